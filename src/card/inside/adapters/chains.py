"""The policy for an engine that verifies chains and lets nothing be measured at start.

It differs from `card.engine.policy.tuned` in what it is told, not in its rule: what a step costs is learnt from the
engine's own steps, and greedy and sampled texts count together, as the engine does not tell them apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from card.engine.policy.acceptance import DEEPEST, Acceptance
from card.engine.policy.choice import best_chain, further_gains, is_worth_drafting
from card.engine.policy.cost import DISCOUNT, Ratio
from card.engine.policy.rounds import bucket
from card.engine.request import Verified
from card.tree.nodes import Nodes

# Share of a step's seconds that its rows take, one row as much as the next, until steps of different sizes were seen.
# Evidence: 0.2 loses nothing where rows are free, and gains 2 % over 0.05 where they are not (benchmarks/LOG.md).
ROW_SHARE = 0.2


class StepCost:
    """Cost and gain of steps at one batch size: a line by rows through those that were seen, fading.

    The prior, `ROW_SHARE`, counts as one step of no rows at all would.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # of 1, rows, seconds, rows squared, rows times seconds, tokens

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take one step; one beyond twice what so many rows should take is a hiccup and counts as that."""
        num, rows, total_s, *_ = self._sums
        if num:
            seconds = min(seconds, 2 * max(1.0, num_rows * num / rows) * total_s / num)
        seen = (1.0, num_rows, seconds, num_rows**2, num_rows * seconds, num_tokens)
        self._sums = [DISCOUNT * total + one for total, one in zip(self._sums, seen, strict=True)]

    @property
    def rate(self) -> float:
        """Tokens per second; 0 until something was seen."""
        _, _, total_s, _, _, tokens = self._sums
        return tokens / total_s if total_s > 0 else 0.0

    @property
    def row_s(self) -> float:
        """Seconds by which one more row lengthens a step."""
        num, rows, total_s, squares, products, _ = self._sums
        if not num:
            return 0.0
        mean = rows / num
        prior = ROW_SHARE * mean * total_s / num
        return max(0.0, products - mean * total_s + prior) / (squares - mean * rows + mean**2)


class ChainPolicy:
    """Chooses the chain of each request, and how far a drafter that takes turns with the engine drafts."""

    def __init__(self, row_cost: float | None = None) -> None:
        """Start without knowledge.

        Args:
            row_cost: tokens that a candidate must bring; None: the rate times what a row costs, as learnt.
        """
        self._row_cost = row_cost
        self._acceptance = Acceptance(
            lasts=False
        )  # it fades, so that drafting starts again: nothing else here would retry
        self._steps: defaultdict[int, StepCost] = defaultdict(StepCost)  # by bucket of batch sizes
        self._passes: defaultdict[int, Ratio] = defaultdict(Ratio)  # the same; seconds of drafter passes

    def observe(self, text_ids: Iterable[int], verified: Sequence[Verified]) -> None:
        """Learn from a step what is accepted.

        Args:
            text_ids: of the texts in it.
            verified: as far as the tokens tell.
        """
        self._acceptance.begin(text_ids)
        self._acceptance.observe(verified)

    def observe_step(self, num_requests: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learn what a step cost in which each request committed a token, and no other one ran.

        Args:
            num_rows: one for each request, and the candidates.
            num_tokens: that were committed.
            seconds: from the handing over of the candidates to the tokens.
        """
        self._steps[bucket(num_requests)].observe(num_rows, num_tokens, seconds)

    def observe_pass(self, num_requests: int, seconds: float) -> None:
        """Learn what a drafter pass for so many requests took while the engine waited."""
        self._passes[bucket(num_requests)].observe(seconds, 1.0)

    def price(self, num_requests: int) -> float:
        """Return the tokens that a candidate must bring in a step of so many requests."""
        step = self._steps[bucket(num_requests)]
        return step.rate * step.row_s if self._row_cost is None else self._row_cost

    def choose(self, offer: Nodes, num_requests: int, most: int) -> Nodes:
        """Return the chain of up to ``most`` candidates that is worth most, in a step of so many requests."""
        probs = self._acceptance.probabilities(offer, is_greedy=True)
        return offer.take(best_chain(offer, probs, self.price(num_requests), most))

    def is_worth_a_pass(
        self, best_paths: Sequence[tuple[int, float]], num_requests: int, most: int, layers_per_pass: int = 1
    ) -> bool:
        """Return whether the next layers bring more tokens than the engine would in their time.

        Args:
            best_paths: depth and path score of the end of the best path of each request that is drafted for.
            num_requests: all that the next step verifies for.
            most: deepest layer that can be verified.
            layers_per_pass: layers that come of a drafter pass.
        """
        gains = [0.0] * DEEPEST
        for depth, path_logprob in best_paths:
            further = further_gains(
                self._acceptance.chance(depth, path_logprob),
                range(depth, min(depth + DEEPEST, most)),
                agreement=self._acceptance.agreement,
                price=self.price(num_requests),
            )
            for layer, gain in enumerate(further):
                gains[layer] += gain
        known = self._passes[bucket(len(best_paths))]
        rate = self._steps[bucket(num_requests)].rate if known.predicted_s else 0.0
        return is_worth_drafting(gains, seconds=known.value, rate=rate, layers_per_pass=layers_per_pass)


def next_budget(num_verified: int, budget: int) -> int:
    """Return how many candidates of a request each local writer is asked for next: twice as many as were verified.

    In a batch few candidates of a request are worth their rows, and writers take Python for each they propose.

    Args:
        num_verified: of such writers' candidates, in this round.
        budget: that of this round; it falls by one a round at most.
    """
    return max(2 * num_verified, 1, budget - 1)
