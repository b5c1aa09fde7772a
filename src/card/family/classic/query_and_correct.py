"""CARD, query and correct: the drafter never stops, the target never asks for a draft (arXiv:2508.04462)."""

from card.config.method import Method

METHOD = Method(
    name="card",
    summary="query and correct: drafter and target run in parallel over a shared candidate tree",
    placement="process",
    usual_writers=("suffix",),  # takes microseconds, and follows repetitions further than a draft model
    is_tuned=True,
)
