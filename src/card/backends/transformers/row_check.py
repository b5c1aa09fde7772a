"""Check that a model under a `TorchRunner` gets the logits of transformers' own forward.

A model may make a mask of its own, or its rows may depend on other rows of a pass. The architecture does not show it.
So a short text is run in each way in which CARD runs texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from card.backends.transformers.runner import TorchRunner
from card.errors import ModelError
from card.models.protocol import Extension, Recurrent

_NUM_TOKENS, _NUM_BESIDE = 12, 21  # of the text, and of a longer one beside it
_NUM_SINGLE = 3  # last tokens that are run one by one
_WINDOW = 4  # tokens of windows and chunks during the check, so that the text outgrows them
# The largest difference of two logits by rounding, relative to the largest logit.
_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}


def check_rows(runner: TorchRunner, name: str) -> None:
    """Check that a runner gets transformers' own logits.

    Args:
        name: of the model, for the error.
    Raises: ModelError, with the ways in which they differ.
    """
    if differing := differing_rows(runner):
        raise ModelError(
            f"{name} cannot be run exactly: the logits of its tokens {differing} from those of transformers' own "
            "forward; use another model, or --no-check to run it as it is"
        )


def differing_rows(runner: TorchRunner) -> str:
    """Return in which ways logits differ from transformers' own, in words such as "at once differ by 3.1", or ""."""
    with runner.narrowed(_WINDOW):
        return rows_that_differ(runner, runner.own_logits)


def rows_that_differ(runner: TorchRunner, own_logits: Callable[[Sequence[int]], Any]) -> str:
    """Return in which ways logits [T, V] differ from those of ``own_logits``, in words, or ""."""
    num_ids = runner.vocab_size - 1
    ids = [1 + 7 * i * i % num_ids for i in range(min(_NUM_TOKENS, runner.max_model_len))]
    longer = [1 + 5 * i % num_ids for i in range(min(_NUM_BESIDE, runner.max_model_len))]
    expected = np.asarray(own_logits(ids))
    allowed = _TOLERANCES.get(runner.precision, 0.1) * max(1.0, float(np.abs(expected).max()))
    ways: dict[str, Callable[[int], Any]] = {
        "at once": lambda slot: runner.forward([_chain(slot, ids)])[0],
        "one by one": lambda slot: _logits_one_by_one(runner, slot, ids),
        **_with_candidates(runner, ids),
        "beside a longer text": lambda slot: _logits_beside(runner, slot, ids, longer),
    }
    for words, run in ways.items():
        slot = runner.open()
        difference = float(np.abs(run(slot) - expected).max())
        runner.close(slot)
        if not difference <= allowed:
            return f"{words} differ by {difference:.2g}"
    return ""


def _with_candidates(runner: TorchRunner, ids: Sequence[int]) -> dict[str, Callable[[int], Any]]:
    if isinstance(runner, Recurrent):
        return {"behind refused tokens": lambda slot: _logits_behind_refused(runner, slot, ids)}
    return {"in a tree": lambda slot: _logits_in_tree(runner, slot, ids)}


def _chain(slot: int, ids: Sequence[int], start: int = 0) -> Extension:
    return Extension(slot, ids, range(start - 1, start + len(ids) - 1))


def _logits_one_by_one(runner: TorchRunner, slot: int, ids: Sequence[int]) -> Any:
    first = len(ids) - min(_NUM_SINGLE, len(ids) - 1)
    parts = [runner.forward([_chain(slot, ids[:first])])[0]]
    for idx in range(first, len(ids)):
        parts.append(runner.forward([_chain(slot, [ids[idx]], idx)])[0])
    return np.concatenate(parts)


def _logits_in_tree(runner: TorchRunner, slot: int, ids: Sequence[int]) -> Any:
    """Return the logits of a text whose later tokens each follow a sibling in the pass."""
    half = len(ids) // 2
    parts = [runner.forward([_chain(slot, ids[:half])])[0]]
    tokens, parents, last = [], [], half - 1
    for token in ids[half:]:
        tokens += [ids[0], token]
        parents += [last, last]
        last = half + len(tokens) - 1
    parts.append(runner.forward([Extension(slot, tokens, parents)])[0][1::2])
    return np.concatenate(parts)


def _logits_behind_refused(runner: TorchRunner, slot: int, ids: Sequence[int]) -> Any:
    """Return the logits of a text in the middle of which another token was run and dropped."""
    half = len(ids) // 2
    parts = [runner.forward([_chain(slot, ids[:half])])[0]]
    parts.append(runner.forward([_chain(slot, [ids[half], ids[0]], half)])[0][:1])
    runner.keep(slot, half + 1)
    if rest := ids[half + 1 :]:
        parts.append(runner.forward([_chain(slot, rest, half + 1)])[0])
    return np.concatenate(parts)


def _logits_beside(runner: TorchRunner, slot: int, ids: Sequence[int], longer: Sequence[int]) -> Any:
    other = runner.open()
    logits = runner.forward([_chain(other, longer), _chain(slot, ids)])[1]
    runner.close(other)
    return logits
