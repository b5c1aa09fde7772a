"""Tokens that other writers than the draft model bring to a text, whether that one drafts or not."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from card.engine.offers import DRAFTER_BIT
from card.engine.request import Verified

_NEW_SHARE = 0.1  # weight of a round in the mean of a text


@dataclass(slots=True)
class CopiedShare:
    """Means over the rounds of a text, or over several texts."""

    num_right: float = 0.0  # leading tokens that such writers had right
    num_verified: float = 0.0  # candidates of theirs
    missed: float = 1.0  # share of the rounds in which they had none right

    def observe(self, one: Verified, num_plain: int) -> None:
        """Take a round of a text, and so many before it in which such writers offered nothing."""
        weight = (1 - _NEW_SHARE) ** num_plain
        self.num_right, self.num_verified = weight * self.num_right, weight * self.num_verified
        self.missed = 1 - weight * (1 - self.missed)
        writers = one.offer.writers
        accepted = one.accepted if writers else ()
        num_right = next((n for n, idx in enumerate(accepted) if writers[idx] == DRAFTER_BIT), len(accepted))
        self.num_right += _NEW_SHARE * (num_right - self.num_right)
        self.num_verified += _NEW_SHARE * (sum(bits != DRAFTER_BIT for bits in writers) - self.num_verified)
        self.missed += _NEW_SHARE * ((not num_right) - self.missed)


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
        texts = {}
        for one in verified:
            share = self._texts.get(one.request_id) or CopiedShare()
            share.observe(one, num_plain)
            if one.request_id not in ended:
                texts[one.request_id] = share
        self._texts = texts
        if not texts:
            self.mean = CopiedShare()
            return
        shares = texts.values()
        self.mean = CopiedShare(
            sum(share.num_right for share in shares) / len(texts),
            sum(share.num_verified for share in shares) / len(texts),
            sum(share.missed for share in shares) / len(texts),
        )
