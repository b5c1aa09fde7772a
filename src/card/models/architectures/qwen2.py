"""Qwen2 and Qwen2.5."""

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap

ARCHITECTURE = Architecture(
    model_class="Qwen2ForCausalLM",
    config=ConfigRule(window_switch="use_sliding_window"),
    biases={"qkv": True},
    gguf=GgufMap(name="qwen2", also="qwen2vl"),
)
