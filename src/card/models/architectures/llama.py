"""Llama, and the many models that are built like it."""

from card.models.architectures.architecture import Architecture
from card.models.gguf_map import GgufMap

ARCHITECTURE = Architecture(
    model_class="LlamaForCausalLM",
    biases={"qkv": "attention_bias", "out": "attention_bias", "mlp": "mlp_bias"},
    gguf=GgufMap(name="llama", pairs=True),
)
