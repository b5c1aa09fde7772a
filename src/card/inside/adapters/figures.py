"""Counters of CARD inside another engine; they only grow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Figures:
    """Counters since the start. The engine's metrics count verified and accepted tokens; these count them by writer.

    A token of several writers counts under their names joined by "+".
    """

    steps: int = 0
    propose_s: float = 0.0  # inside `propose`, seconds
    slowest_propose_s: float = 0.0
    requests_begun: int = 0
    requests_resumed: int = 0  # with a row again after a preemption
    proposed_by_writer: Counter[str] = field(default_factory=Counter)
    accepted_by_writer: Counter[str] = field(default_factory=Counter)
    empty_rows: int = 0  # rows without a candidate that was worth its cost
    misses: int = 0  # messages of the drafter for finished requests
    declined: int = 0  # requests that the drafter refused, for example as its model lacks a token
    rejections: int = 0  # malformed messages of the drafter
