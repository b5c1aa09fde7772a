"""Drafting before a pass: the target gives the drafter a turn, or waits for it, as the policy says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from card.engine.dialogue import Dialogue
from card.engine.guarded_policy import GuardedPolicy
from card.engine.live import LiveRequest
from card.engine.policy.rounds import Draft, RoundView, Wait


@dataclass(slots=True)
class DraftingTurn:
    """The drafter's part of one round, in steps: each step asks the policy once."""

    view: RoundView  # of the round, updated by each step
    _decoding: Sequence[LiveRequest]
    _drafter: Dialogue
    _calls: GuardedPolicy
    _clock: Callable[[], float]
    _started: float

    def step(self) -> bool:
        """Ask the policy and carry out its decision. Returns: whether to ask again."""
        order = self._calls.prepare(self.view)
        if self.view.takes_turns and isinstance(order, Draft):
            self._drafter.let_catch_up()
            passes = self._drafter.link.draft(order.num_passes, order.end)
            self._listen()
            self.view = replace(self.view, has_drafted=True, passes=passes)
        elif not self.view.takes_turns and isinstance(order, Wait):
            self._drafter.link.wait(order.seconds)
            self._listen()
            self.view = replace(self.view, num_short=num_short(self._drafter, self._decoding))
            return True
        self._note()
        return False

    def _listen(self) -> None:
        self._drafter.listen()
        requests = [one.sequence.request for one in self._decoding]  # the drafter may have declined one
        self.view = replace(self.view, requests=requests, waited_s=self._clock() - self._started)

    def _note(self) -> None:
        """Record the waiting; if the drafter sent nothing meanwhile, it is not waited for until it does."""
        view = self.view
        self._drafter.tracing.waited(self._started, view.waited_s, takes_turns=view.takes_turns)
        for one in self._decoding if view.waited_s else ():
            one.sequence.stats.waited_s += view.waited_s
            if not view.takes_turns and one.is_waited_for:
                one.unheard_at = one.sequence.stats.drafter_passes


def num_short(drafter: Dialogue, decoding: Sequence[LiveRequest]) -> int:
    """Return how many requests want to wait for a drafter that runs by itself."""
    return sum(one.is_waited_for for one in decoding) if drafter.link.status.state == "up" else 0
