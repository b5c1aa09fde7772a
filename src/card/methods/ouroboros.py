"""Ouroboros: phrases lengthen the drafted chain, and both models' passes add to the phrases (arXiv:2402.13720)."""

from card.methods.method import Method
from card.methods.sps import chain_in_turns

METHOD = Method(
    name="ouroboros",
    summary="sequential drafts, lengthened by phrases that earlier passes left behind",
    shape=lambda draft: chain_in_turns(draft).replace(budget=draft.num_speculative_tokens + draft.budget),
    writers=("phrases",),
)
