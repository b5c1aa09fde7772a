"""Choose the draft writer of models on a CUDA device; its modules are not imported for other models."""

from __future__ import annotations

from typing import Any

from card.drafting.protocol import DraftWriter
from card.machine.importing import load_place
from card.models.protocol import LanguageModel


def make_writer(model: LanguageModel, kv_cache_bytes: int | None = None, **asked: Any) -> DraftWriter | None:
    """Return the writer of a model with recorded passes; None for any other model.

    Args:
        asked: as of `card.drafting.draft_writers.make_writer`.
    """
    if asked["parallel"] is not None or not getattr(model, "has_recorded_passes", False):
        return None
    kind = load_place("card.theirs.cuda.device_beam:DeviceBeamWriter")
    looks_ahead = not asked["takes_turns"]
    writer: DraftWriter = kind(model, kv_cache_bytes, looks_ahead=looks_ahead, find_grammar=asked["find_grammar"])
    return writer
