"""Qwen3: norms of queries and keys."""

from card.models.architectures.architecture import HEAD_NORMS, PRE_NORMS, Architecture
from card.models.architectures.qwen2 import Qwen2Fields


class Qwen3Fields(Qwen2Fields):
    """Its config."""

    model_type = "qwen3"
    head_dim: int | list[int] = 128
    attention_bias: bool = False


ARCHITECTURE = Architecture(
    model_class="Qwen3ForCausalLM",
    config_class=Qwen3Fields,
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    norms={**PRE_NORMS, **HEAD_NORMS},
    gguf_name="qwen3",
    gguf_also="qwen3vl",
    gguf_ignored=frozenset({"n_deepstack_layers"}),
)
