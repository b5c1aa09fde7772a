"""Qwen2 and Qwen2.5."""

from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap


def drop_window(config: Any, others: dict[str, Any]) -> None:
    """Drop a window that is switched off."""
    if not config.use_sliding_window:
        config.sliding_window = None


ARCHITECTURE = Architecture(
    model_class="Qwen2ForCausalLM",
    config=ConfigRule(complete=drop_window),
    biases={"qkv": True},
    gguf=GgufMap(name="qwen2", also="qwen2vl"),
)
