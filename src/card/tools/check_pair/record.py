"""The command that measures whether a draft model makes a target faster."""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command(
            "check-pair",
            "Measure whether a draft model is worth its while.",
            "card.tools.check_pair.options:check_pair",
        ),
    )
)
