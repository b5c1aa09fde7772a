"""CARD, query and correct: the drafter never stops, the target never asks for a draft (arXiv:2508.04462)."""

from card.config.method import Method

METHOD = Method(
    name="card",
    summary="query and correct: on few cores a chain in turns, on a drafter's own cores or device a tree beside",
    placement="process",
    usual_writers=("suffix",),  # takes microseconds, and follows repetitions further than a draft model
    is_tuned=True,
)
