"""HiViS: a drafter reads text and the target's hidden states, and never places of images (arXiv:2509.23928).

`card.models.own.fused_head` runs it, and `card.family.states` drafts with it.
"""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command(
            "train hivis", "Train a drafter for a target that sees images.", "card.family.hivis.options:hivis", "torch"
        ),
    ),
)
