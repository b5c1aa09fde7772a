"""SSD, speculative speculative decoding: drafts for each likely outcome of the running pass (arXiv:2603.03251).

The target verifies a chain of K drafts. Meanwhile the drafter guesses outcomes of that verification: at each of the
K + 1 positions, the likeliest tokens that the chain does not have. For each outcome it drafts the next K tokens. If the
true outcome is among them, the next chain is ready at once. Otherwise the target waits for a new one; with
``waits_after_miss`` off it verifies candidates of other writers, as those of ``--writers beam,lookup``.
"""

from __future__ import annotations

from card.config import DraftSettings, TreeShape
from card.config.method import Method, in_rounds

_SPARE_LAYERS = 2


def outcomes_of_one_chain(draft: DraftSettings) -> DraftSettings:
    """Return settings under which all outcomes of a chain of num_speculative_tokens get a chain of their own."""
    length = draft.num_speculative_tokens
    return in_rounds(
        draft, verify="chain", growth="fan-out", budget=length, lead=2 * length + _SPARE_LAYERS, min_depth=length
    )


def passes_for_all_outcomes(draft: DraftSettings) -> list[int]:
    """Return the tokens of the drafter passes of a round: each lengthens the chain of every outcome by one."""
    fan_out, length = TreeShape.of(draft).fan_out, draft.num_speculative_tokens
    num_outcomes = sum(fan_out[min(position, len(fan_out) - 1)] for position in range(length + 1))
    return [max(num_outcomes, 1)] * length


METHOD = Method(
    name="ssd",
    summary="while a chain is verified, chains are drafted for each likely outcome of that verification",
    placement="process",
    shape=outcomes_of_one_chain,
    passes_of_round=passes_for_all_outcomes,
)
