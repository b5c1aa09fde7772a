"""EAGLE-3: a head of one layer that reads states of three layers of its target (arXiv:2503.01840).

`card.models.own.eagle_head` runs it, and `card.family.states` drafts with it.
"""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command(
            "train eagle",
            "Train an EAGLE-3 head for a target.",
            "card.family.eagle.options:eagle",
            "torch",
        ),
    ),
)
