"""Choosing how many candidates a round verifies: expected tokens against their seconds.

Everything maximises ``expected tokens - rate * seconds``, with the long-run committed tokens per second as the rate: a
second must bring at least what it brings elsewhere. The choice that is best at the rate that it yields has the most
tokens per second of all. Source: Dinkelbach 1967, On nonlinear fractional programming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from card.tree.nodes import Nodes


def choose(
    offers: Sequence[Sequence[float]],
    *,
    seconds: Callable[[int], float],
    rate: float,
    num_prefill_tokens: int = 0,
    max_per_request: int | None = None,
) -> list[int]:
    """Return how many leading candidates of each request the next pass verifies: the smallest of the best sets.

    Every size of the set is weighed, as seconds may rise in steps: a candidate may not pay for a step that several
    together pay for.

    Args:
        offers: for each request that commits a token in this pass, the acceptance probabilities of its candidates,
            parents before children; may be empty. A candidate that is likelier than an earlier one of its offer counts
            as that one, so the best candidates over all requests are always leading ones.
        seconds: of a pass with so many new tokens; never falling.
        rate: tokens per second to match; 0 takes all candidates that may be accepted at all.
        num_prefill_tokens: tokens in the pass besides the candidates and one token of each request.
        max_per_request: most candidates of one request; None sets no limit.
    """
    merged = sorted(
        (-probability, depth_idx, request_idx)
        for request_idx, offer in enumerate(offers)
        for depth_idx, probability in enumerate(accumulate(offer[:max_per_request], min))
    )
    num_base_tokens = len(offers) + num_prefill_tokens
    expected_tokens = float(len(offers))
    best_value, num_best = expected_tokens - rate * seconds(num_base_tokens), 0
    for num_taken, (negative_probability, _, _) in enumerate(merged, 1):
        expected_tokens -= negative_probability
        value = expected_tokens - rate * seconds(num_base_tokens + num_taken)
        if value > best_value:
            best_value, num_best = value, num_taken
    counts = [0] * len(offers)
    for _, _, request_idx in merged[:num_best]:
        counts[request_idx] += 1
    return counts


def best_by_depth(offer: Nodes, probs: Sequence[float]) -> list[float]:
    """Return the highest acceptance probability at each depth, from depth 1 on; parents come before children."""
    best: list[float] = []
    for depth, probability in zip(offer.depths, probs, strict=True):
        if depth > len(best):
            best.append(0.0)
        best[depth - 1] = max(best[depth - 1], probability)
    return best
