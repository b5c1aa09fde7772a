"""Phases of requests that draft for themselves: in each round about one in K + 1 of them verifies, the others draft.

Drafts and verifications of a self-drafting model run the same weights, so one pass holds both. The more of its requests
verify, the longer a pass takes; phases spread the verifications evenly over the passes. Source: SparseSpec,
arXiv:2512.01278, the unified batch scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Phase:
    period: int  # rounds from one verification to the next
    place: int  # a request verifies in the rounds whose number has this remainder


class Phases:
    """The phases of all self-drafting requests. A request gets its phase in its first round and keeps it."""

    def __init__(self) -> None:
        self._round = 0
        self._phases: dict[int, _Phase] = {}

    def begin_round(self) -> None:
        """Go on to the next round."""
        self._round += 1

    def is_due(self, request_id: int, length: int) -> bool:
        """Return whether a request verifies in this round; ``length``: tokens drafted between two verifications."""
        if request_id not in self._phases:
            self._phases[request_id] = _Phase(length + 1, self._least_loaded(length + 1))
        phase = self._phases[request_id]
        return self._round % phase.period == phase.place

    def leave(self, request_id: int) -> None:
        """Free the phase of a finished request, if it had one."""
        self._phases.pop(request_id, None)

    def _least_loaded(self, period: int) -> int:
        """Return the place with the fewest requests; at a tie, the one that leaves most time for drafts."""
        loads = [0] * period
        for phase in self._phases.values():
            if phase.period == period:
                loads[phase.place] += 1
        now = self._round % period  # a request verifies in its first round anyway, since no rows are chosen yet
        return min(range(period), key=lambda place: (loads[place], -((place - now - 1) % period)))
