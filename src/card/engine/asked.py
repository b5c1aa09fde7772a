"""Rounds of requests in which each writer was asked for candidates, and rounds in which it was not, by the reason.

The draft model is not asked where plain decoding is faster (`plain`), other writers' candidates are likely enough
(`copied`), or reading the text costs more than its drafts bring (`costly`); while it reads this text (`reads`) or
others first (`waits`); if it is `down`, or cannot follow the text (`declined`). Another writer `rests` if it brought
nothing lately, or has `failed` in this text. No writer is asked if the `request` turns speculation off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from card.config import DrafterState, Schedule
from card.engine.live import LiveRequest
from card.engine.offers import DRAFTER, GRAMMAR
from card.engine.policy.rounds import bucket


class AskedRounds:
    """Counts by writer, class of batch sizes, and `asked` or the reason."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str, str]]()

    def count(
        self,
        decoding: Sequence[LiveRequest],
        *,
        resting: Container[int],
        drafter: DrafterState,
        schedule: Schedule,
        undrafted: Mapping[int, str],
    ) -> None:
        """Count a round.

        Args:
            resting: numbers of requests whose local writers were not asked.
            drafter: state of the drafter.
            undrafted: why the policy leaves the drafter out, by number of the request.
        """
        most = 1 << bucket(len(decoding))
        size = f"{most // 2 + 1}-{most}" if most > 2 else str(most)
        for one in decoding:
            request, offers = one.sequence.request, one.sequence.offers
            for name in offers.names[1:]:
                is_asked = request.request_id not in resting or name == GRAMMAR
                why = "failed" if offers.has_failed(name) else "asked" if is_asked else "rests"
                self.counts[name, size, why] += 1
            if drafter != "none":
                why = _why_undrafted(one, drafter, schedule) or undrafted.get(request.request_id, "asked")
                self.counts[DRAFTER, size, why] += 1


def _why_undrafted(one: LiveRequest, drafter: DrafterState, schedule: Schedule) -> str:
    """Return why the drafter is not asked, whatever the policy says of this request; empty if it may be."""
    if not one.request.params.speculates:
        return "request"
    if one.sequence.stats.declined:
        return "declined"
    if drafter not in ("up", "degraded"):
        return "down"
    return "plain" if schedule == "off" else ""
