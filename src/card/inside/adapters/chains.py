"""The policy for an engine that verifies chains and allows no measurements at start.

Its rule is that of `card.engine.policy.tuned`; its data differ. The cost of a step is learnt from the engine's own
steps, and greedy and sampled texts count together, as the engine does not distinguish them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from card.engine.policy.acceptance import DEEPEST, Acceptance
from card.engine.policy.cost import DISCOUNT, Ratio
from card.engine.policy.rounds import bucket
from card.engine.request import Verified
from card.tree.nodes import ROOT, Nodes

# Share of a step's seconds that grows with its rows, until steps of different sizes were seen.
# Evidence: 0.2 loses nothing where rows are free, and gains 2 % over 0.05 where they are not (benchmarks/LOG.md).
ROW_SHARE = 0.2


class StepCost:
    """Cost and gain of steps at one batch size: a line in the number of rows through the observed steps, with decay.

    The prior, `ROW_SHARE`, has the weight of one step without rows.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # of 1, rows, seconds, rows squared, rows times seconds, tokens

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learn from one step; its time counts as at most twice the expected time."""
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
        """Seconds of one more row in a step."""
        num, rows, total_s, squares, products, _ = self._sums
        if not num:
            return 0.0
        mean = rows / num
        prior = ROW_SHARE * mean * total_s / num
        return max(0.0, products - mean * total_s + prior) / (squares - mean * rows + mean**2)


class ChainPolicy:
    """Chooses the chain of each request, and the depth of drafts from a drafter in turns with the engine."""

    def __init__(self, row_cost: float | None = None) -> None:
        """Start without observations.

        Args:
            row_cost: tokens that a candidate must gain; None: the learnt rate times the learnt cost of a row.
        """
        self._row_cost = row_cost
        self._acceptance = Acceptance(lasts=False)  # it fades, so that drafting starts again
        self._steps: defaultdict[int, StepCost] = defaultdict(StepCost)  # by bucket of batch sizes
        self._passes: defaultdict[int, Ratio] = defaultdict(Ratio)  # by the same buckets; seconds of drafter passes

    def observe(self, text_ids: Iterable[int], verified: Sequence[Verified]) -> None:
        """Learn the acceptance from a step.

        Args:
            text_ids: of the texts in the step.
            verified: as far as the tokens show it.
        """
        self._acceptance.begin(text_ids)
        self._acceptance.observe(verified)

    def observe_step(self, num_requests: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learn the cost of a step in which each request committed a token and no other request ran.

        Args:
            num_rows: one for each request, and the candidates.
            num_tokens: committed tokens.
            seconds: from handing over the candidates to getting the tokens.
        """
        self._steps[bucket(num_requests)].observe(num_rows, num_tokens, seconds)

    def observe_pass(self, num_requests: int, seconds: float) -> None:
        """Learn the time of a drafter pass for ``num_requests`` requests while the engine waited."""
        self._passes[bucket(num_requests)].observe(seconds, 1.0)

    def price(self, num_requests: int) -> float:
        """Return the tokens that a candidate must gain in a step of ``num_requests`` requests."""
        step = self._steps[bucket(num_requests)]
        return step.rate * step.row_s if self._row_cost is None else self._row_cost

    def choose(self, offer: Nodes, num_requests: int, most: int) -> Nodes:
        """Return the most valuable chain of up to ``most`` candidates in a step of ``num_requests`` requests."""
        probs = self._acceptance.probabilities(offer, is_greedy=True)
        return offer.take(best_chain(offer, probs, self.price(num_requests), most))

    def is_worth_a_pass(
        self, best_paths: Sequence[tuple[int, float]], num_requests: int, most: int, layers_per_pass: int = 1
    ) -> bool:
        """Return whether the next layers gain more tokens than the engine would write in their time.

        Args:
            best_paths: depth and path score of the end of the best path of each request with a drafter.
            num_requests: all requests of the next step.
            most: deepest layer that can be verified.
            layers_per_pass: layers of one drafter pass.
        """
        gains, price, agreement = [0.0] * DEEPEST, self.price(num_requests), self._acceptance.pair.value
        for depth, path_logprob in best_paths:
            chance = self._acceptance.pair.calibration.chance(depth, path_logprob)
            for layer in range(min(DEEPEST, most - depth)):
                gains[layer] += chance * agreement ** (1 + layer) - price
        known = self._passes[bucket(len(best_paths))]
        rate = self._steps[bucket(num_requests)].rate if known.predicted_s else 0.0
        passes = (sum(gains[at : at + layers_per_pass]) for at in range(0, DEEPEST, layers_per_pass))
        return max(accumulate(gain - rate * known.value for gain in passes)) > 0.0  # later layers may pay for the first


def best_chain(offer: Nodes, probs: Sequence[float], price: float, most: int) -> list[int]:
    """Return the indices of the most valuable chain, from the root down; empty if none is worth its price.

    Args:
        offer: a tree, parents before children.
        probs: of each candidate to be accepted.
        price: tokens that each must bring; most: most candidates.
    """
    best_below = [(0.0, ROOT)] * (len(offer) + 1)  # value of the best chain below, its first node; the root's is last
    for idx in range(len(offer) - 1, -1, -1):
        parent, value = offer.parents[idx], probs[idx] - price + best_below[idx][0]
        if offer.depths[idx] <= most and value > best_below[parent][0]:
            best_below[parent] = value, idx
    chain = []
    node = best_below[ROOT][1]
    while node != ROOT:
        chain.append(node)
        node = best_below[node][1]
    return chain


def next_budget(num_verified: int, budget: int) -> int:
    """Return the next budget of each local writer for a request: twice the candidates that were verified.

    In a batch few candidates of a request are worth their rows, and each proposal costs time in Python.

    Args:
        num_verified: local writers' candidates in this round.
        budget: of this round; it falls by at most one a round.
    """
    return max(2 * num_verified, 1, budget - 1)
