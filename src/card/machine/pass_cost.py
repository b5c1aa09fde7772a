"""Cost of forward passes on this machine: seconds by tokens, sequences and context."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from card.errors import SettingsError
from card.machine.expert_cost import ExpertCounts, ExpertPrice, ExpertUse


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one forward pass of one model on a given number of threads.

    Linear between the measured points and, beyond the last, along the line through the last two; never falling with
    more tokens: a point below an earlier one is noise and is raised to it. With experts, the price that `ExpertPrice`
    fits to the points.

    Raises: SettingsError unless there are two points or more with rising token counts, and all seconds are 0 or more.
    """

    points: tuple[tuple[int, float], ...]  # (new tokens, seconds) of one sequence with a short context
    per_sequence_s: float = 0.0  # for each sequence after the first, at the same number of tokens
    per_context_row_s: float = 0.0  # for each row held before the pass, summed over the sequences
    experts: ExpertCounts | None = None  # that passes read; None: the model has none
    _by_experts: tuple[ExpertPrice, ExpertUse] | None = field(init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _lines: tuple[tuple[int, float, float], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = tuple(num_tokens for num_tokens, _ in self.points)
        if len(starts) < 2 or starts[0] < 1 or any(b <= a for a, b in pairwise(starts)):
            raise SettingsError(
                f"points must be two or more with rising numbers of tokens from 1 on, got {self.points}; measure passes"
                " of at least two sizes"
            )
        times = (*(seconds for _, seconds in self.points), self.per_sequence_s, self.per_context_row_s)
        if not all(0.0 <= seconds < math.inf for seconds in times):
            raise SettingsError(f"seconds of a pass must be finite and 0 or more, got {times}")
        points = tuple(zip(starts, accumulate((seconds for _, seconds in self.points), max), strict=True))
        lines = [(x, y, (next_y - y) / (next_x - x)) for (x, y), (next_x, next_y) in pairwise(points)]
        below, last_slope = (starts[0], points[0][1], 0.0), lines[-1][2]
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_lines", (below, *lines, (*points[-1], last_slope)))
        counts = self.experts
        priced = None if counts is None else (ExpertPrice.fitted(points, counts), ExpertUse(counts))
        object.__setattr__(self, "_by_experts", priced)

    def seconds(
        self,
        num_tokens: float,
        num_sequences: float = 1,
        num_context_rows: float = 0,
        num_experts: float | None = None,
    ) -> float:
        """Return the seconds of one pass; 0 if it has no tokens, for then none is made.

        Args:
            num_tokens: new tokens of all sequences together; a mean need not be whole.
            num_sequences: sequences that share them; the same.
            num_context_rows: rows that these sequences hold already, all together.
            num_experts: distinct experts that it reads, summed over the layers; None: by the measured passes.
        """
        if num_tokens < 1:
            return 0.0
        shared_s = (num_sequences - 1) * self.per_sequence_s + num_context_rows * self.per_context_row_s
        if self._by_experts is not None:
            price, use = self._by_experts
            num_read = use.expected(num_tokens) if num_experts is None else num_experts
            return price.seconds(num_tokens, num_read) + shared_s
        x, y, slope = self._lines[bisect_right(self._starts, num_tokens)]
        return y + slope * (num_tokens - x) + shared_s

    def scaled(self, factor: float) -> PassCost:
        """Return a copy in which everything takes ``factor`` times as long."""
        points = tuple((num_tokens, factor * seconds) for num_tokens, seconds in self.points)
        return PassCost(points, factor * self.per_sequence_s, factor * self.per_context_row_s, self.experts)
