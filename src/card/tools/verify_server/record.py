"""The command that compares a server with and without speculation."""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command(
            "verify-server",
            "Check that a server writes the same with and without speculation.",
            "card.tools.verify_server.options:verify_server",
        ),
    )
)
