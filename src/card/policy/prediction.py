"""What a schedule promises: tokens per second, from what passes cost and what is accepted."""

from __future__ import annotations

from card.policy.acceptance import DEEPEST, Acceptance
from card.policy.cost import Costs
from card.policy.rounds import Schedule


def tokens_per_s(
    costs: Costs,
    acceptance: Acceptance,
    schedule: Schedule,
    num_requests: int,
    width: int,
    agreement: float | None = None,
) -> float:
    """Return the expected speed of a schedule at this batch size, at its best number of drafted layers.

    The draft model and other writers are taken to be right independently of each other.

    Args:
        agreement: as of `Acceptance`; None: as learnt so far.
    """
    chances, num_rows = acceptance.others
    agreement = acceptance.agreement if agreement is None else agreement
    alone = tokens = 1 + sum(chances)
    around_s, draft_s = costs.around_s(schedule, num_requests), costs.draft_s(schedule, num_requests, width)
    alone_s = around_s + costs.pass_s(schedule, num_requests * (1 + num_rows), num_requests)
    best, reached = alone / alone_s, 1.0
    for depth in range(1, 1 + DEEPEST if costs.drafts(schedule) else 1):
        reached *= agreement
        tokens += (1 - chances[depth - 1]) * reached
        seconds = around_s + costs.pass_s(schedule, num_requests * (1 + num_rows + depth), num_requests)
        if schedule == "turns":  # where others are right at once, the drafter is not asked
            best = max(best, tokens / (seconds + (1 - chances[0]) * depth * draft_s))
            continue
        # Beside, a path that ends is as unlikely to go on elsewhere in the tree as a candidate is to be wrong. Then the
        # drafter begins anew: the next round has others' candidates only, and what was drafted meanwhile is in vain.
        lost = (1 - reached) * (1 - agreement)
        cycle_s = seconds + lost * alone_s
        token_s = draft_s + (1 - agreement) ** 2 * seconds
        best = max(best, min(tokens + lost * alone, max(alone, cycle_s / max(token_s, 1e-9))) / cycle_s)
    return num_requests * best
