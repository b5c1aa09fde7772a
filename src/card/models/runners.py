"""Choose the runner that suits a model, and describe how it runs. No other module knows all runners."""

from __future__ import annotations

from typing import Any

from card.config import INT8
from card.models.by_transformers import torch_module
from card.models.loaded_model import LoadedModel
from card.models.own.decoder_model import DecoderModel
from card.models.protocol import Recurrent, Routed, Stateful
from card.models.recording_runner import RecordingRunner, exact_runner
from card.models.runner import RowRunner

_THEIRS = "a model of transformers"


def plain_runner(
    model: LoadedModel, *, max_model_len: int, max_tree_rows: int = 512, own_pass: bool | None = None
) -> RowRunner:
    """Return the runner that suits ``model`` on any device, without recorded passes.

    Args:
        max_model_len, max_tree_rows: as of `RowRunner`.
        own_pass: run a model of transformers in our own pass instead of its modules; None: where possible.
    Raises: ModelError if the model cannot be run, or not the way asked for.
    """
    sizes = {"max_model_len": max_model_len, "max_tree_rows": max_tree_rows}
    if isinstance(model, DecoderModel):
        return exact_runner(model, **sizes)
    made: RowRunner = torch_module("transformers.runners", _THEIRS).plain_runner(model, own_pass=own_pass, **sizes)
    return made


def make_runner(
    model: LoadedModel, *, max_model_len: int, max_tree_rows: int = 512, cuda_graphs: bool = False
) -> RowRunner:
    """Return the runner that suits ``model``; arguments and errors as of `plain_runner`.

    Args:
        cuda_graphs: record passes on a CUDA device, where the model allows it.
    """
    sizes: dict[str, Any] = {"max_model_len": max_model_len, "max_tree_rows": max_tree_rows}
    if not cuda_graphs or isinstance(model, DecoderModel):
        return plain_runner(model, **sizes)
    made: RowRunner | None = torch_module("cuda.choosing", _THEIRS).make_runner(model, **sizes)
    return made or plain_runner(model, **sizes)


def how_it_runs(runner: RowRunner) -> str:
    """Return the path of a model, its numbers, its experts and its limits, in one line for users."""
    path, *limits = _path_and_limits(runner)
    if isinstance(runner, Routed) and (experts := runner.experts) is not None:
        path += f", {experts.experts_per_token} of {experts.num_experts} experts in {experts.num_expert_layers} layers"
    if runner.switch_len is not None:
        limits.append(f"texts of more than {runner.switch_len} tokens are read once more")
    return "; ".join([path, *limits])


def _path_and_limits(runner: RowRunner) -> list[str]:
    numbers = "8-bit integers" if runner.precision == INT8 else runner.precision
    if runner.has_own_pass:
        words = [f"own pass in {'the blocks of the file' if runner.has_blocks else numbers}", "trees of candidates"]
        if isinstance(runner, Stateful):
            has_state = isinstance(runner, RecordingRunner) and runner.keeps_state
            contents = "a state and records" if has_state else "records"
            words.append(f"{runner.state_bytes / 1e6:,.1f} MB of {contents} a request")
        return words
    if not isinstance(runner, Recurrent):
        return [f"transformers' modules in {numbers} with CARD's attention", "trees of candidates", "no int8"]
    words = [f"transformers' modules in {numbers} with a state", "chains only"]
    words += [f"{runner.state_bytes / 1e6:,.1f} MB of states a request", "no int8"]
    if getattr(runner, "runs_row_by_row", False):
        words.append("prompts and candidates token by token through layers with a state")
    return words
