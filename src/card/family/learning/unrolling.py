"""Unrolled training: in each step a head reads what it guessed in the step before, as in drafting.

In step s a row reads the state that the row before it guessed in step s - 1. It attends to rows of the target's states
up to s places before its own, and to its own path behind them: the rows of steps 1 to s.

Source: EAGLE-3, arXiv:2503.01840 (training-time test).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

STEP_WEIGHT = 0.8  # factor of the loss from step to step
MEASURED_STEPS, _MOST_MEASURED = 5, 2048  # tokens of a chain; rows of held-out texts


def seen_in(step: int, num_rows: int) -> Tensor:
    """Return which rows each row attends to, [T, (step + 1) * T] bool: those of steps 0 to ``step``."""
    places = torch.arange(num_rows)
    behind = places[:, None] - places
    return torch.cat([behind >= step, *(behind == step - earlier for earlier in range(1, step + 1))], 1)


def of_the_row_before(states: Tensor) -> Tensor:
    """Return states [B, T, D] one place later, zeros first."""
    return functional.pad(states[:, :-1], (0, 0, 1, 0))


class ChainCounts:
    """Counts of the chains on held-out texts that are right to each depth."""

    def __init__(self, num_steps: int) -> None:
        """Count chains of up to ``num_steps`` tokens."""
        self._right, self._seen = [0] * num_steps, [0] * num_steps

    @property
    def is_enough(self) -> bool:
        """Return whether more texts would tell little."""
        return self._seen[0] >= _MOST_MEASURED

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of chains whose first k tokens are right, for k = 1 and more, in [0, 1]."""
        return tuple(num_right / max(1, count) for num_right, count in zip(self._right, self._seen, strict=True))

    def add(self, guesses: Iterable[Tensor], labels: Tensor) -> None:
        """Count the chains that begin at each of a text's last rows.

        Args:
            guesses: [n] of these rows in each step.
            labels: [n] what is right there.
        """
        is_right = torch.ones(len(labels) + 1, dtype=torch.bool)  # of the chain that began so many rows before
        for depth, guess in zip(range(min(len(self._right), len(labels))), guesses, strict=False):
            is_right = is_right[:-1] & (guess == labels)[depth:]
            self._right[depth] += int(is_right.sum())
            self._seen[depth] += len(is_right)
