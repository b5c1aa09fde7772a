"""The kinds of layers that models are made of, in transformers' words."""

from __future__ import annotations

from typing import Any

from card.errors import ModelError
from card.models.loaded_model import LoadedModel

WITH_WINDOW = frozenset({"sliding_attention", "hybrid_sliding"})
WITH_CHUNKS = frozenset({"chunked_attention"})
WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "moe", "mlp", "dummy"})  # they keep no keys
WITH_STATE = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_KNOWN = {"full_attention"} | WITH_WINDOW | WITH_CHUNKS | WITHOUT_ATTENTION | WITH_STATE


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer. Raises: ModelError if CARD knows none of that name."""
    check_kinds(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        is_full = getattr(config, "sliding_window", None) is None
        return ["full_attention" if is_full else "sliding_attention"] * config.num_hidden_layers
    return list(kinds)


def check_kinds(config: Any) -> None:
    """Raise ModelError if a layer is of a kind that CARD does not know."""
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN)
    if other:
        raise ModelError(
            f"{config.model_type} has layers of type {', '.join(other)}, which CARD cannot run; choose a model with"
            " full, sliding or chunked attention, or with linear attention, convolutions or Mamba beside it"
        )


def layer_windows(config: Any, max_model_len: int) -> list[int | None]:
    """Return the sliding window of each layer; None where a layer has no window, or one so long that it never matters.

    Raises: ModelError if a layer is of a kind that CARD does not know.
    """
    window = getattr(config, "sliding_window", None)
    is_short = window is not None and window < max_model_len
    return [window if kind in WITH_WINDOW and is_short else None for kind in layer_kinds(config)]


def has_state(model: LoadedModel) -> bool:
    """Return whether a model keeps a state besides one row per token."""
    config = model.config.get_text_config()
    if getattr(config, "layer_types", None) is None:
        return bool(getattr(model, "_is_stateful", False))
    return keeps_state(config)


def keeps_state(config: Any) -> bool:
    """Return whether a config names layers with a state."""
    return not WITH_STATE.isdisjoint(getattr(config, "layer_types", None) or ())
