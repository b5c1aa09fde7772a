"""Qwen3: norms of queries and keys."""

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import HEAD_NORMS, PRE_NORMS

ARCHITECTURE = Architecture(
    model_class="Qwen3ForCausalLM",
    config=ConfigRule(window_switch="use_sliding_window"),
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    norms={**PRE_NORMS, **HEAD_NORMS},
    gguf=GgufMap(name="qwen3", also="qwen3vl", ignored=frozenset({"n_deepstack_layers"})),
)
