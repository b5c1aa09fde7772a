"""Sequential speculative decoding: draft a chain, then verify it, in turns (Leviathan et al. 2023, arXiv:2211.17192).

Acceptance is by match, so that the text is that of plain decoding at any temperature.
"""

from __future__ import annotations

from card.config import DraftSettings
from card.config.method import BenchRow, Method, in_rounds


def chain_in_turns(draft: DraftSettings) -> DraftSettings:
    """Return settings under which a chain of num_speculative_tokens is drafted and waited for in each round."""
    length = draft.num_speculative_tokens
    return in_rounds(draft, verify="chain", beam_width=1, branch=1, budget=length, lead=length, min_depth=length)


METHOD = Method(
    name="sps",
    summary="draft a chain, then verify it, in turns",
    shape=chain_in_turns,
    rows=(BenchRow(name="sps", drafter="turns", has_lengths=True, has_twin=True, has_uncoupled=True, is_best=False),),
)
