"""Commands that measure methods and draw the results."""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command(
            "bench",
            "Measure methods against each other: speed, acceptance, same text.",
            "card.tools.bench.options:bench",
        ),
        Command("report", "Make a page and a table of bench files.", "card.tools.bench.options:report"),
    )
)
