"""Tokens that other writers than the draft model bring to a text, whether that one drafts or not."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from card.engine.offers import DRAFTER_BIT
from card.engine.request import Verified

_NEW_SHARE = 0.1  # weight of a round in the mean of a text


class CopiedShare(NamedTuple):
    """Means over the rounds of a text, or over several texts."""

    num_right: float = 0.0  # leading tokens that such writers had right
    num_verified: float = 0.0  # candidates of theirs
    hits: float = 0.0  # share of the rounds in which they had one right
    offered: float = 0.0  # share of the rounds in which a candidate of theirs was verified

    def after(self, one: Verified, num_plain: int) -> CopiedShare:
        """Return the means after a round of a text, and so many before it in which such writers offered nothing."""
        writers = one.offer.writers
        accepted = one.accepted if writers else ()
        num_right = next((n for n, idx in enumerate(accepted) if writers[idx] == DRAFTER_BIT), len(accepted))
        num_verified = sum(bits != DRAFTER_BIT for bits in writers)
        seen = num_right, num_verified, num_right > 0, num_verified > 0
        kept = (1 - _NEW_SHARE) ** (1 + num_plain)
        return CopiedShare(*(kept * old + _NEW_SHARE * new for old, new in zip(self, seen, strict=True)))


class Copied:
    """Tokens that such writers bring to the running texts; earlier texts say nothing about new ones."""

    def __init__(self) -> None:
        self._texts: dict[int, CopiedShare] = {}  # by request
        self.mean = CopiedShare()

    def observe(self, verified: Sequence[Verified], ended: Container[int], *, num_plain: int = 0) -> None:
        """Learn from the verifications of a round. Texts that ended in it, or are not in it, are forgotten.

        Args:
            num_plain: rounds since the last observed one, in which nobody had candidates.
        """
        self._texts = {
            one.request_id: self._texts.get(one.request_id, CopiedShare()).after(one, num_plain)
            for one in verified
            if one.request_id not in ended
        }
        shares = self._texts.values()
        self.mean = CopiedShare(*(sum(each) / len(shares) for each in zip(*shares, strict=True)))
