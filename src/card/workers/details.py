"""Per-token provenance: which writer proposed a token, how likely it was, and what was verified beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from card.tree.nodes import ROOT, Nodes
from card.tree.sampling import TokenLogprobs
from card.tree.verify import Verdict
from card.workers.offers import DRAFTER, writer_label

CORRECTED = ""  # origin of a token that the target chose itself where candidates were wrong or ran out
PLAIN = "plain"  # origin of a token of a round without candidates

Alternative = tuple[int, float, str]
"""(token, path log-probability, writer) of a candidate."""


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Details of a run of tokens, one entry for each; empty where the request did not ask for them."""

    origins: tuple[str, ...] = ()  # the writers that proposed it, joined by "+", or CORRECTED or PLAIN
    logprobs: tuple[TokenLogprobs, ...] = ()
    alternatives: tuple[tuple[Alternative, ...], ...] = ()  # candidates that were verified in its place, best first

    @classmethod
    def joined(cls, parts: Iterable[TokenDetails]) -> TokenDetails:
        """Return the details of runs that follow each other."""
        listed = list(parts)
        if len(listed) == 1:
            return listed[0]
        return cls(
            tuple([origin for part in listed for origin in part.origins]),
            tuple([logprob for part in listed for logprob in part.logprobs]),
            tuple([beside for part in listed for beside in part.alternatives]),
        )

    def leading(self, count: int) -> TokenDetails:
        """Return those of the first ``count`` tokens."""
        return TokenDetails(self.origins[:count], self.logprobs[:count], self.alternatives[:count])


def origins_of(offer: Nodes, verdict: Verdict, names: Sequence[str]) -> tuple[str, ...]:
    """Return where each token of a verdict came from; ``names`` as of `Offers`."""
    own = CORRECTED if offer else PLAIN
    return (*(_writer(offer, idx, names) for idx in verdict.accepted), own)


def alternatives_to(offer: Nodes, verdict: Verdict, names: Sequence[str]) -> tuple[tuple[Alternative, ...], ...]:
    """Return the candidates that were verified in the place of each token of a verdict, and rejected."""
    beside: dict[int, list[int]] = {}
    for idx, parent in enumerate(offer.parents):
        beside.setdefault(parent, []).append(idx)
    places = zip((ROOT, *verdict.accepted), (*verdict.accepted, None), strict=True)
    found = []
    for parent, chosen in places:
        others = [idx for idx in beside.get(parent, ()) if idx != chosen]
        others.sort(key=lambda idx: -offer.path_logprobs[idx])
        found.append(tuple([(offer.tokens[i], offer.path_logprobs[i], _writer(offer, i, names)) for i in others]))
    return tuple(found)


def _writer(offer: Nodes, idx: int, names: Sequence[str]) -> str:
    return writer_label(offer.writers[idx], names) if offer.writers else DRAFTER
