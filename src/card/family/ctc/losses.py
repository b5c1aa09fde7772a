"""Losses of the training of a head; quick to import, as help needs them."""

from __future__ import annotations

from typing import Literal, get_args

Loss = Literal["ctc", "cross-entropy"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
