"""EXAONE 4: norms of what a block adds alone, and only layers with a window know positions where there are such."""

from collections.abc import Mapping
from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.architectures.olmo2 import POST_NORMS
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import HEAD_NORMS


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out."""
    if config.sliding_window is None:
        config.sliding_window_pattern = 0
    config.give_windows(config.sliding_window_pattern)


def turns(config: Any, layer: int) -> bool:
    """Return whether a layer has rotary embeddings."""
    return config.sliding_window is None or config.layer_types[layer] == "sliding_attention"


def gguf_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return that no layer has a window in a file that states none."""
    if "sliding_window" in config:
        return {}
    return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


ARCHITECTURE = Architecture(
    model_class="Exaone4ForCausalLM",
    config=ConfigRule(complete=_complete),
    norms={**POST_NORMS, **HEAD_NORMS},
    has_windows=True,
    turns=turns,
    gguf=GgufMap(name="exaone4", fields=gguf_fields),
)
