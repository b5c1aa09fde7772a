"""Choose the runner that suits a model, and describe how it runs. No other module knows all runners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from card.config import INT8
from card.models.layer_kinds import has_state
from card.models.protocol import Recurrent
from card.models.torch_runner import TorchRunner
from card.theirs.transformers.hybrid import HybridRunner

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel


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
    from card.theirs.cuda.bucketed import BucketedRunner

    return BucketedRunner(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)


def how_it_runs(runner: TorchRunner) -> str:
    """Return the path of a model and its limits, in one line for users."""
    if runner.has_own_pass:
        numbers = "8-bit integers" if runner.precision == INT8 else runner.precision
        words = [f"own pass in {'the blocks of the file' if runner.has_blocks else numbers}", "trees of candidates"]
    elif isinstance(runner, Recurrent):
        megabytes = f"{runner.state_bytes / 1e6:,.1f} MB"
        words = ["transformers' modules with a state", "chains only", f"{megabytes} of states a request", "no int8"]
    else:
        words = ["transformers' modules with CARD's attention", "trees of candidates", "no int8"]
    if isinstance(runner, HybridRunner) and runner.runs_row_by_row:
        words.append("prompts and candidates token by token through layers with a state")
    if runner.switch_len is not None:
        words.append(f"texts of more than {runner.switch_len} tokens are read once more")
    return "; ".join(words)
