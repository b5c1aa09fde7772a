"""ERNIE 4.5, dense: Llama whose neighbouring channels turn together."""

from card.models.architectures.architecture import Architecture
from card.models.gguf_map import GgufMap

ARCHITECTURE = Architecture(
    model_class="Ernie4_5ForCausalLM",
    biases={"qkv": "use_bias", "out": "use_bias", "mlp": "use_bias"},
    turns_neighbours=True,
    gguf=GgufMap(name="ernie4_5"),
)
