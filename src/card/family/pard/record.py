"""PARD: one drafter pass drafts a chain of K tokens, then one verification, in turns (arXiv:2504.18583).

The draft model was adapted by `card train pard`, or is a published one. Every method can use such a model and then gets
several layers a pass; this method is the published one.
"""

from card.config.method import BenchRow, Method
from card.config.record import Command, Record
from card.family.classic.sps import chain_in_turns

RECORD = Record(
    methods=(
        Method(
            name="pard",
            summary="a chain that one pass of an adapted draft model guesses, then one verification, in turns",
            needs_parallel_draft=True,
            shape=chain_in_turns,
            rows=(BenchRow(name="pard", drafter="turns", has_lengths=True, has_twin=True),),
        ),
    ),
    draft_writer="card.family.pard.writer:make_writer",
    commands=(
        Command(
            "train pard",
            "Adapt a draft model to draft several tokens a pass.",
            "card.family.pard.options:pard",
            "torch",
        ),
    ),
)
