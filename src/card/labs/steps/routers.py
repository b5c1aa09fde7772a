"""Routers: they decide whether the draft model's step is kept.

Each has one knob. At 0 the target writes every step, so that the text is that of plain decoding; the larger the knob,
the more steps of the draft model are kept.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, Protocol

from card.config.fields import require
from card.labs.steps.rewards import Reward

Writer = Literal["draft", "target"]


@dataclass(frozen=True, slots=True)
class Step:
    """A written step, with everything that a router may use."""

    question: str
    before: str  # text of the answer before the step
    text: str  # of the step, its delimiter included
    first_entropy: float  # nats, of its writer at the step's first token
    entropies: tuple[float, ...] = ()  # at each token; empty for a step of the target
    writers: tuple[Writer, ...] = ()  # of the steps before it


class Router(Protocol):
    """Decides which steps of the draft model are kept."""

    knob: float  # 0: none
    needs_target: bool  # it compares with the target's step, which is then always written

    def keeps(self, drafted: Step, targets: Step | None) -> bool:
        """Return whether the draft model's step is kept; ``targets`` is the target's, for routers that need it."""


class EntropyRouter:
    """Keep a step if the draft model's entropy at its first token is below ``knob`` nats. No training.

    Source: GlimpRouter, arXiv:2601.05110. The entropy is that of the 20 likeliest tokens; all others count as one.
    """

    needs_target = False

    def __init__(self, knob: float) -> None:
        """Take the knob. Raises: SettingsError if it is below 0."""
        self.knob = _checked(knob, math.inf)

    def keeps(self, drafted: Step, targets: Step | None) -> bool:
        """Return whether the draft model's step is kept."""
        return drafted.first_entropy < self.knob


class RandomRouter:
    """Keep a share ``knob`` of the steps, independent of their content: a baseline for other routers."""

    needs_target = False

    def __init__(self, knob: float, seed: int = 0) -> None:
        """Take the knob. Raises: SettingsError if it is not in [0, 1]."""
        self.knob = _checked(knob, 1.0)
        self._random = random.Random(seed)

    def keeps(self, drafted: Step, targets: Step | None) -> bool:
        """Return whether the draft model's step is kept."""
        return self._random.random() < self.knob


class RewardRouter:
    """Keep a step after which the answer has a reward of at least 1 - ``knob``.

    Source: reward-guided speculative decoding (RSD), as arXiv:2512.05033 describes it; its threshold is 0.7.
    """

    needs_target = False

    def __init__(self, knob: float, reward: Reward) -> None:
        """Take the knob. Raises: SettingsError if it is not in [0, 1]."""
        self.knob, self._reward = _checked(knob, 1.0), reward

    def keeps(self, drafted: Step, targets: Step | None) -> bool:
        """Return whether the draft model's step is kept."""
        return self._reward(drafted.question, drafted.before + drafted.text) >= 1.0 - self.knob


class OracleRouter:
    """Keep a step unless the target's has a reward that is higher by more than ``knob`` - 1.

    It needs both steps, so it saves nothing: it is the upper bound of routers with this reward. A knob of 1 takes the
    target's step only if that is a gain. Source: Arbitrage, arXiv:2512.05033.
    """

    needs_target = True

    def __init__(self, knob: float, reward: Reward) -> None:
        """Take the knob. Raises: SettingsError if it is not in [0, 2]."""
        self.knob, self._reward = _checked(knob, 2.0), reward

    def keeps(self, drafted: Step, targets: Step | None) -> bool:
        """Return whether the draft model's step is kept."""
        assert targets is not None
        own, theirs = (self._reward(one.question, one.before + one.text) for one in (drafted, targets))
        return theirs - own <= self.knob - 1.0


def _checked(knob: float, most: float) -> float:
    allowed = "0 or more" if most == math.inf else f"from 0 to {most:g}; 0 is exact"
    require(isinstance(knob, int | float) and 0.0 <= knob <= most, "the knob of a router", allowed, knob)
    return float(knob)
