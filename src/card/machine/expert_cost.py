"""Cost of passes of a model with experts: seconds = a + b * distinct experts read + c * rows.

Rows of a pass that choose the same expert read its weights once. So seconds rise steeply with the first rows and
slowly later, where a dense model's do the reverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from card.errors import SettingsError

Array = npt.NDArray[np.float64]

_EVEN_WEIGHT = 1.0  # of the guess that no expert is popular, in passes of e times as many rows as others


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """Distinct experts that measured passes of a model read; all numbers are sums over its layers.

    Raises: SettingsError unless a row reads one expert or more of as many, and all counts are of one row or more.
    """

    num_experts: int
    per_row: int  # that a pass of one row reads
    counted: tuple[tuple[int, int], ...] = ()  # (rows, experts read) of measured passes

    def __post_init__(self) -> None:
        if not 1 <= self.per_row <= self.num_experts:
            raise SettingsError(
                f"a row must read 1 to {self.num_experts} of {self.num_experts} experts, got {self.per_row}"
            )
        for num_rows, num_read in self.counted:
            if num_rows < 1 or not 0 <= num_read <= self.num_experts:
                raise SettingsError(
                    f"a pass must have 1 row or more and read 0 to {self.num_experts} experts, got {num_rows} rows and "
                    f"{num_read} experts"
                )


class ExpertUse:
    """Predicts the distinct experts of a pass from those of passes so far.

    The first row of a pass reads ``per_row``. If rows choose evenly and independently, each further one reads a share
    p = per_row / num_experts of those that are left, so n rows leave exp(-r * (n - 1)) of what the first one left, with
    r = -log(1 - p). Where rows choose alike r is lower. Where some experts are popular with all rows, later rows find
    fewer new ones still: the exponent is r * (n - 1) ** g with g from 0 to 1. Both are read off a line through passes,
    log(exponent) by log(n - 1).
    """

    def __init__(self, counts: ExpertCounts, kept: float = 1.0) -> None:
        """Begin with the measured passes; each further pass leaves the share ``kept`` of the weight of earlier ones."""
        self._num_experts, self._left_by_first = counts.num_experts, counts.num_experts - counts.per_row
        self._kept = kept
        self._sums: tuple[float, ...] = (0.0,) * 5  # of 1, x, y, x * x and x * y over the passes
        for num_rows, num_read in counts.counted:
            self.observe(num_rows, num_read)

    def observe(self, num_rows: int, num_read: int) -> None:
        """Count a pass; one of a single row says nothing, nor does one that left nothing unread."""
        num_left = self._num_experts - num_read
        if num_rows < 2 or num_left < 1 or not self._left_by_first:
            return
        exponent = math.log(self._left_by_first / min(num_left, self._left_by_first - 0.5))  # half an expert is 0
        x, y = math.log(num_rows - 1), math.log(exponent)
        terms = (1.0, x, y, x * x, x * y)
        self._sums = tuple(self._kept * old + new for old, new in zip(self._sums, terms, strict=True))

    def expected(self, num_rows: float) -> float:
        """Return the distinct experts that a pass of so many rows is expected to read; a mean need not be whole."""
        if num_rows <= 1 or not self._left_by_first:
            return self._num_experts - self._left_by_first
        start, growth = self._line()
        return self._num_experts - self._left_by_first * math.exp(-math.exp(start) * (num_rows - 1) ** growth)

    def _line(self) -> tuple[float, float]:
        """Return log r and g."""
        weight, x, y, xx, xy = self._sums
        if not weight:
            return math.log(math.log(self._num_experts / self._left_by_first)), 1.0
        growth = (xy - x * y / weight + _EVEN_WEIGHT) / (xx - x * x / weight + _EVEN_WEIGHT)
        growth = min(max(growth, 0.0), 1.0)
        return (y - growth * x) / weight, growth


@dataclass(frozen=True, slots=True)
class ExpertPrice:
    """Parts of the seconds of a pass."""

    pass_s: float
    expert_s: float  # of each distinct expert that it reads
    row_s: float

    def seconds(self, num_rows: float, num_read: float) -> float:
        """Return the seconds of a pass of so many rows that reads so many distinct experts."""
        return self.pass_s + self.expert_s * num_read + self.row_s * num_rows

    @classmethod
    def fitted(cls, points: Sequence[tuple[int, float]], counts: ExpertCounts) -> ExpertPrice:
        """Return the price that fits measured passes: least squares of relative errors, no part below 0.

        Too few passes to tell the parts apart count as the price of the pass and its experts: so what lies between
        them is not taken to be cheap.

        Args:
            points: (rows, seconds) of passes; experts that were not counted are predicted.
        """
        use, counted = ExpertUse(counts), dict(counts.counted)
        parts = np.array([(1.0, counted.get(n) or use.expected(n), n) for n, _ in points])
        seconds = np.maximum([seconds for _, seconds in points], 1e-9)
        return cls(*_non_negative(parts / seconds[:, None]).tolist())


def _non_negative(parts: Array) -> Array:
    """Return the factors [P], none below 0, with which the sums of columns of ``parts`` [n, P] come nearest to 1."""
    best, least = np.zeros(parts.shape[1]), math.inf
    for size in range(min(parts.shape), 0, -1):
        for chosen in combinations(range(parts.shape[1]), size):
            factors = np.zeros(parts.shape[1])
            factors[list(chosen)] = np.linalg.lstsq(parts[:, chosen], np.ones(len(parts)), rcond=None)[0]
            error = round(float(np.square(parts @ factors - 1.0).sum()), 12)  # the first of equals wins
            if (factors >= 0.0).all() and error < least:
                best, least = factors, error
    return best
