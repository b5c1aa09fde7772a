"""Counters of what CARD did inside another engine; they only grow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Figures:
    """Counters since the start. The engine's metrics count verified and accepted tokens; these count them by writer.

    A token that several writers proposed counts under all their names, joined by "+".
    """

    steps: int = 0
    propose_s: float = 0.0  # inside `propose`, seconds
    slowest_propose_s: float = 0.0
    requests_begun: int = 0
    requests_resumed: int = 0  # found again after they had no row: preempted ones
    proposed_by_writer: Counter[str] = field(default_factory=Counter)
    accepted_by_writer: Counter[str] = field(default_factory=Counter)
    empty_rows: int = 0  # rows of which no candidate was worth its cost, or for which there was none
    misses: int = 0  # messages of the drafter for requests that were over
    declined: int = 0  # requests that the drafter did not draft for: its model lacks a token of theirs, say
    rejections: int = 0  # messages that no honest drafter sends
