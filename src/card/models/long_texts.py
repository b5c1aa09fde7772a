"""Texts beyond the context of the first training, whose rows some models compute in another way (longrope)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from card.errors import ModelError, named
from card.models.names import model_name

LONG_ROPE = "longrope"  # the type of angles with one list of factors for short texts, and one for long ones

CHANGES_WITH_LENGTH = "its rotary embedding (longrope) changes with the length of the text"  # why something cannot be


def switch_len(model: Any, max_model_len: int) -> int | None:
    """Return the longest text that has the short factors; None if no text up to ``max_model_len`` has others.

    Raises: ModelError if the layers of the model differ in it.
    """
    stated = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [one for one in stated.values() if isinstance(one, Mapping)]
    stated_lengths = {
        int(one["original_max_position_embeddings"])
        for one in by_layer_type or [stated]
        if one.get("rope_type") == LONG_ROPE
    }
    lengths = sorted(length for length in stated_lengths if length < max_model_len)
    if len(lengths) > 1:
        raise ModelError(
            f"the layers of {model_name(model)} take their rotary factors for long texts from different lengths on:"
            f" {lengths}; set {named('max_model_len')} to {lengths[1]} or less"
        )
    return lengths[0] if lengths else None
