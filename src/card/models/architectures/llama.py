"""Llama, and the many models that are built like it."""

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import DecoderConfig


class LlamaFields(DecoderConfig):
    """Its config."""

    model_type = "llama"
    pretraining_tp: int | None = 1
    attention_bias: bool = False
    mlp_bias: bool = False


ARCHITECTURE = Architecture(
    model_class="LlamaForCausalLM",
    config_class=LlamaFields,
    biases={"qkv": "attention_bias", "out": "attention_bias", "mlp": "mlp_bias"},
    gguf_name="llama",
    gguf_pairs=True,
)
