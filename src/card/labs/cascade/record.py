"""The command that chooses examples or instructions."""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command(
            "choose-examples",
            "Choose examples or instructions by the target's loss.",
            "card.labs.cascade.options:choose_examples",
            "torch",
        ),
    )
)
