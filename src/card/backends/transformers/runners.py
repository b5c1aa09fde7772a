"""Choose the runner of a model of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from card.backends.transformers.hybrid import HybridRunner
from card.backends.transformers.runner import TorchRunner
from card.backends.transformers.walking import walked, why_not_exact
from card.errors import ModelError
from card.models.layer_kinds import has_state
from card.models.names import model_name
from card.models.own.decoder_model import is_int8
from card.models.recording_runner import exact_runner
from card.models.runner import RowRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plain_runner(
    model: PreTrainedModel, *, max_model_len: int, max_tree_rows: int = 512, own_pass: bool | None = None
) -> RowRunner:
    """Return the runner of ``model`` on any device, without recorded passes.

    Args:
        own_pass: run its weights in our own pass (see `architectures`) instead of its modules; None: if possible.
    Raises: ModelError if the model cannot be run in this way.
    """
    sizes: dict[str, Any] = {"max_model_len": max_model_len, "max_tree_rows": max_tree_rows}
    if own_pass is not False:
        reason = why_not_exact(model)
        decoder = None if reason else walked(model)
        if decoder is not None:
            return exact_runner(decoder, **sizes)
        if own_pass or is_int8(model):
            what = "has no own pass" if own_pass else "cannot run in int8"
            advice = "leave own_pass at None" if own_pass else "use dtype bfloat16 or float32"
            raise ModelError(f"{model_name(model)} {what}: {reason}; {advice}")
    return HybridRunner(model, **sizes) if has_state(model) else TorchRunner(model, **sizes)
