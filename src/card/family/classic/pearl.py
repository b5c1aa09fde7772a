"""PEARL: rounds of one target pass beside one block of drafts (Liu et al. 2024, arXiv:2408.11850).

The drafter writes a single chain and always assumes that the target accepts all of it. While a block is verified it
drafts the next one (post-verify). After a rejection the target runs the last token alone, which verifies the first
token of the block that is drafted meanwhile (pre-verify). A rejection anywhere drops every draft.
"""

from __future__ import annotations

from card.config import DraftSettings
from card.config.method import Method, in_rounds


def rounds_of_one_chain(draft: DraftSettings) -> DraftSettings:
    """Return settings under which target and drafter meet after each block of num_speculative_tokens drafts."""
    length = max(draft.num_speculative_tokens, 2)
    return in_rounds(
        draft,
        verify="chain",
        growth="layer",
        beam_width=1,
        branch=1,
        budget=length - 1,  # the pass also verifies the token after them, the first of the next block
        lead=2 * length - 1,
        min_depth=length - 1,
        waits_after_miss=False,
    )


METHOD = Method(
    name="pearl",
    summary="rounds of one target pass beside one block of drafts, verified before and after they are complete",
    placement="process",
    shape=rounds_of_one_chain,
    passes_of_round=lambda draft: [1] * draft.num_speculative_tokens,
)
