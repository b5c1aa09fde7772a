"""Choose the runner that suits a model: the one place that knows which there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from card.models.hybrid import HybridRunner
from card.models.layer_kinds import has_state
from card.models.torch_runner import TorchRunner

if TYPE_CHECKING:
    from card.models.decoder_model import LoadedModel


def plain_runner(model: LoadedModel, **settings: Any) -> TorchRunner:
    """Return the runner that suits ``model`` on any device: a `HybridRunner` if it has a state, else a `TorchRunner`.

    Arguments and errors as of `TorchRunner`.
    """
    if not has_state(model):
        return TorchRunner(model, **settings)
    return HybridRunner(model, **settings)


def make_runner(model: LoadedModel, *, max_model_len: int, max_tree_rows: int = 512) -> TorchRunner:
    """Return the runner that suits ``model`` and its device: a `BucketedRunner` on CUDA if it has no state.

    Arguments and errors as of `TorchRunner`.
    """
    if model.device.type != "cuda" or has_state(model):
        return plain_runner(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)
    from card.models.cuda.bucketed import BucketedRunner

    return BucketedRunner(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)
