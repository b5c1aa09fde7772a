"""Calls to a policy. A failing policy costs speed but changes no text: the round then verifies nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from card.config import Schedule
from card.engine.policy.rounds import Draft, Outcome, Policy, RoundView, Wait
from card.errors import in_words
from card.tree.nodes import NO_NODES, Nodes

logger = logging.getLogger(__name__)
T = TypeVar("T")


class GuardedPolicy:
    """Calls a policy. The first error of each kind of call is logged."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._reported: set[str] = set()

    def begin(self, num_requests: int, available: frozenset[Schedule]) -> None:
        """Start a round; after a failure the policy keeps its schedule."""
        self._try("begin", lambda: self._policy.begin(num_requests, available), None)

    def beam_width(self) -> int | None:
        """Return the width of the drafter's layers; None leaves it as the settings say."""
        return self._try("beam_width", self._policy.beam_width, None)

    def prepare(self, view: RoundView) -> Draft | Wait | None:
        """Return what to do before the pass; None to verify what there is."""
        return self._try("prepare", lambda: self._policy.prepare(view), None)

    def choose(self, view: RoundView, offers: Sequence[Nodes]) -> Sequence[Nodes]:
        """Return what to verify of each offer."""
        return self._try("choose", lambda: self._policy.choose(view, offers), [NO_NODES] * len(offers))

    def observe(self, outcome: Outcome) -> None:
        """Let the policy learn from a finished round."""
        self._try("observe", lambda: self._policy.observe(outcome), None)

    def _try(self, name: str, call: Callable[[], T], default: T) -> T:
        try:
            return call()
        except Exception as error:
            if name not in self._reported:
                self._reported.add(name)
                logger.error("the policy failed in %s; decoding goes on: %s", name, in_words(error), exc_info=error)
            return default
