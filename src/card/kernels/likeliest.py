"""The likeliest tokens of rows of scores: machine code where there is some, torch elsewhere."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from card.kernels.machine_code import has_machine_code, machine_code


def likeliest(scores: Tensor, count: int, *, sharpness: float = 1.0) -> tuple[list[list[int]], list[list[float]]]:
    """Return the best ``count`` tokens of each row and their log-probabilities, best first; all V if there are fewer.

    Torch's calls would cost half as much as the pass of a small draft model before them.

    Args:
        scores: [N, V] float32 or float64 on the CPU.
        sharpness: what the scores are times.
    Returns: token ids and log-probabilities, N lists of each. The latter are NaN in a row that has a NaN or an
        infinity, or rules every token out.
    """
    num_rows, num_tokens = scores.shape
    count, rank = min(count, num_tokens), _rank()
    if scores.dtype != torch.float32 or rank is None:
        best = (scores * sharpness).log_softmax(-1).topk(count, dim=-1)
        return best.indices.tolist(), best.values.tolist()
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    places = num_rows * count
    tokens, values = (ctypes.c_int64 * places)(), (ctypes.c_float * (places + num_rows))()
    best_at = ctypes.addressof(values)
    rank(
        scores.data_ptr(), num_rows, 4 * scores.stride(0), num_tokens, sharpness, count, ctypes.addressof(tokens),
        best_at, best_at + 4 * places,
    )  # fmt: skip
    logs = [math.log(total) for total in values[places:]]
    firsts = range(0, places, count)
    return (
        [tokens[first : first + count] for first in firsts],
        [[value - log for value in values[first : first + count]] for first, log in zip(firsts, logs, strict=True)],
    )


def prepare() -> None:
    """Have the machine code ready before it is needed."""
    _rank()


@functools.cache
def _rank() -> Any:
    """Return the machine code; None if there is none."""
    return machine_code("likeliest").rank if has_machine_code() else None
