"""Commands that predict the speed of every method."""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command("profile", "Measure what the passes of a model cost here.", "card.tools.planner.options:profile"),
        Command("record", "Record how a pair of models behaves, for plans.", "card.tools.planner.options:record"),
        Command(
            "plan",
            "Predict the speed of every method from profiles and a recording.",
            "card.tools.planner.options:plan",
        ),
    )
)
