"""A reward of steps that has learnt nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from card.family.judges.auto import PairFacts
from card.family.judges.steps import StepReward
from card.models.loading import load_decoder
from card.models.runners import make_runner


def write_reward(path: Path, target: str, draft: str, ends: Iterable[int]) -> str:
    """Write a reward with drawn weights and return its name: what it keeps is a matter of chance."""
    of_target = make_runner(load_decoder(target, dtype="float32"), max_model_len=64)
    pair = PairFacts.of(of_target, draft)
    weights = np.random.default_rng(2).normal(size=pair.width).astype(np.float32)
    StepReward(weights, 0.0, usual=0.6, pair=pair, knob=None, ends=frozenset(ends)).save(path)
    return str(path)
