"""Ouroboros: the draft model drafts with phrases, phrases extend its chain, and passes of both models add phrases.

Source: arXiv:2402.13720.
"""

from card.config import DraftSettings
from card.config.method import BenchRow, Method
from card.family.classic.sps import chain_in_turns


def _shape(draft: DraftSettings) -> DraftSettings:
    """Return settings of a chain that the draft model drafts phrase by phrase, with room for phrases after it."""
    return chain_in_turns(draft).replace(budget=draft.num_speculative_tokens + draft.budget, growth="phrases")


METHOD = Method(
    name="ouroboros",
    summary="a chain that the draft model drafts by phrases, lengthened by phrases that earlier passes left behind",
    shape=_shape,
    writers=("phrases",),
    rows=(BenchRow(name="ouroboros-all-cores", drafter="turns", has_lengths=True),),
)
