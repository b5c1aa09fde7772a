"""How far a drafter that takes turns with the engine drafts: what layers bring against what the engine would."""

from __future__ import annotations

from collections.abc import Sequence

from card.policy.acceptance import Agreement
from card.policy.choice import is_worth_drafting
from card.policy.cost import DISCOUNT, Ratio
from card.tree.nodes import Nodes
from card.workers.offers import DRAFTER_BIT


class Turns:
    """Learns how often the draft model agrees and how long its passes take."""

    def __init__(self) -> None:
        """Begin with a first guess, to which everything fades back: drafting that did not pay is tried again."""
        self._agreement = Agreement()
        self._pass_s: dict[int, Ratio] = {}  # by batch size: 1, 2-3, 4-7, ...

    @property
    def agreement(self) -> float:
        """Chance in [0, 1] that the draft model's candidate below an accepted one is accepted."""
        return self._agreement.value

    def begin_step(self) -> None:
        """Let what is known count for a little less."""
        self._agreement.fade(DISCOUNT)

    def observe(self, chain: Nodes, num_accepted: int) -> None:
        """Take what became of a chain, of which the first ``num_accepted`` were right: one more was compared."""
        for idx, writers in enumerate(chain.writers[: num_accepted + 1]):
            if writers & DRAFTER_BIT:
                self._agreement.observe(idx < num_accepted, 1)

    def observe_pass(self, num_requests: int, seconds: float) -> None:
        """Take what one drafter pass took for so many requests."""
        self._pass_s.setdefault(num_requests.bit_length(), Ratio()).observe(seconds, 1.0)

    def is_worth_a_pass(
        self, reached: Sequence[tuple[int, float]], most: int, *, row_cost: float, rate: float | None
    ) -> bool:
        """Return whether the next layers bring more tokens than the engine would in their time.

        Args:
            reached: depth of each request's candidates so far, and the chance that all of these are accepted.
            most: deepest layer that can be verified.
            row_cost: tokens that a candidate must bring to be verified.
            rate: tokens per second of the engine; None: not known yet.
        """
        known = self._pass_s.get(len(reached).bit_length())
        gains = [0.0] * max(0, most - min(depth for depth, _ in reached))
        for depth, chance in reached:
            for layer in range(most - depth):
                gains[layer] += max(0.0, chance * self.agreement ** (layer + 1) - row_cost)
        if known is None or rate is None:
            return any(gain > 0.0 for gain in gains)
        return is_worth_drafting(gains, seconds=known.value, rate=rate)
