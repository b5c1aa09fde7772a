"""Unrolled training: in each step a head reads what it guessed in the step before, as in drafting.

In step s a row reads the state that the row before it guessed in step s - 1. It attends to rows of the target's states
up to s places before its own, and to its own path behind them: the rows of steps 1 to s.

Source: EAGLE-3, arXiv:2503.01840 (training-time test).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

STEP_WEIGHT = 0.8  # factor of the loss from step to step


def seen_in(step: int, num_rows: int) -> Tensor:
    """Return which rows each row attends to, [T, (step + 1) * T] bool: those of steps 0 to ``step``."""
    places = torch.arange(num_rows)
    behind = places[:, None] - places
    return torch.cat([behind >= step, *(behind == step - earlier for earlier in range(1, step + 1))], 1)


def of_the_row_before(states: Tensor) -> Tensor:
    """Return states [B, T, D] one place later, zeros first."""
    return functional.pad(states[:, :-1], (0, 0, 1, 0))
