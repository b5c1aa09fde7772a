"""PARD: a chain of K tokens that one drafter pass guesses, then one verification, in turns (arXiv:2504.18583).

The draft model is one that `card train pard` has adapted. Every method takes such a model and then has its layers
several at a time; this one is the published one.
"""

from card.methods.method import Method
from card.methods.sps import chain_in_turns

METHOD = Method(
    name="pard",
    summary="a chain that one pass of an adapted draft model guesses, then one verification, in turns",
    needs_parallel_draft=True,
    shape=chain_in_turns,
)
