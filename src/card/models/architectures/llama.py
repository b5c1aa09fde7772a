"""Llama, and the many models that are built like it."""

from huggingface_hub.dataclasses import strict

from card.models.architectures.architecture import Architecture, DecoderConfig


@strict
class LlamaFields(DecoderConfig):
    """Its config."""

    model_type = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
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
