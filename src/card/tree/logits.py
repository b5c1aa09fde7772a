"""Logits as arrays: NumPy's, or another device's that chooses its likeliest tokens by itself."""

from __future__ import annotations

from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
# What is no number is found where a token is chosen, and told to the user there.
silent_about_no_numbers = np.errstate(divide="ignore", invalid="ignore", over="ignore")


@runtime_checkable
class DeviceLogits(Protocol):
    """Logits [N, V] on another device than the CPU. NumPy reads them, in float32 or float64, by copying them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """N and V."""

    def __len__(self) -> int:
        """Return N."""

    def __getitem__(self, rows: slice) -> Self:
        """Return some rows."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> FloatArray:
        """Return them as an array on the CPU."""

    def likeliest(self) -> tuple[list[int], list[float]]:
        """Return the token with the largest logit of each row, the first of equal ones, and that logit."""


Logits = FloatArray | DeviceLogits  # [N, V]


def as_array(logits: Logits) -> FloatArray:
    """Return logits on the CPU in float32, or in float64 if they have it."""
    array: FloatArray = np.asarray(logits)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


@silent_about_no_numbers
def softmax(scores: FloatArray) -> FloatArray:
    """Return the law of scores [..., V], in their dtype; minus infinity becomes 0."""
    probs: FloatArray = scores - scores.max(-1, keepdims=True)
    np.exp(probs, out=probs)
    probs /= probs.sum(-1, keepdims=True)
    return probs


@silent_about_no_numbers
def log_softmax(scores: FloatArray) -> FloatArray:
    """Return the logarithms of the law of scores [..., V], in their dtype."""
    shifted: FloatArray = scores - scores.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def top(scores: FloatArray, count: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Return the ``count`` largest scores of each row [N, V] and their tokens, [N, count] each, the largest first."""
    count = min(count, scores.shape[-1])
    if count == scores.shape[-1]:
        best = np.argsort(-scores, axis=-1, kind="stable")
    else:
        some = np.argpartition(-scores, count - 1, axis=-1)[..., :count]
        some.sort(axis=-1)  # so that the first of equal ones comes first
        order = np.argsort(-np.take_along_axis(scores, some, -1), axis=-1, kind="stable")
        best = np.take_along_axis(some, order, -1)
    return best.astype(np.int64, copy=False), np.take_along_axis(scores, best, -1)
