"""Choose runner, lane and draft writer for recorded passes on a CUDA device; their modules are imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from card.drafting.protocol import DraftWriter
from card.machine.importing import load_place
from card.machine.lane import Lane
from card.models.layer_kinds import has_state
from card.models.protocol import LanguageModel
from card.models.runner import RowRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_runner(model: PreTrainedModel, **sizes: int) -> RowRunner | None:
    """Return the runner that records the passes of a model; None if it is elsewhere than on CUDA, or keeps a state.

    Args:
        sizes: as of `RowRunner`.
    """
    if not is_cuda(model.device) or has_state(model):
        return None
    runner: RowRunner = load_place("card.backends.cuda.bucketed:BucketedRunner")(model, **sizes)
    return runner


def make_lane(device: object) -> Lane:
    """Return a place of its own on a device."""
    if not is_cuda(device):
        return Lane()
    lane: Lane = load_place("card.backends.cuda.stream_lane:StreamLane")(str(device))
    return lane


def is_cuda(device: object) -> bool:
    """Return whether passes can be recorded on a device."""
    return str(device).startswith("cuda")


def make_writer(model: LanguageModel, kv_cache_bytes: int | None = None, **asked: Any) -> DraftWriter | None:
    """Return the writer of a model with recorded passes; None for any other model.

    Args:
        asked: as of `card.drafting.draft_writers.make_writer`.
    """
    if asked["parallel"] is not None or not getattr(model, "has_recorded_passes", False):
        return None
    kind = load_place("card.backends.cuda.device_beam:DeviceBeamWriter")
    looks_ahead = not asked["takes_turns"]
    writer: DraftWriter = kind(model, kv_cache_bytes, looks_ahead=looks_ahead, find_grammar=asked["find_grammar"])
    return writer
