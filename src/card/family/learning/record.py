"""Trainings."""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command("train", "Train a small model that helps a pair.", "card.family.learning.options:train", "torch"),
    )
)
