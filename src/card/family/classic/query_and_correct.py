"""CARD, query and correct: the drafter never stops, the target never asks for a draft (arXiv:2508.04462)."""

from typing import Any

from card.config.method import BenchRow, Method


def _fixed(name: str, *, has_uncoupled: bool = False, is_best: bool = True, **draft: Any) -> BenchRow:
    return BenchRow(
        name=name, drafter="beside", takes_options=True, draft=draft, has_uncoupled=has_uncoupled, is_best=is_best
    )


METHOD = Method(
    name="card",
    summary="query and correct: on few cores a chain in turns, on a drafter's own cores or device a tree beside",
    placement="process",
    usual_writers=("suffix",),  # takes microseconds, and follows repetitions further than a draft model
    is_tuned=True,
    rows=(
        _fixed("card-chain", verify="chain", has_uncoupled=True, is_best=False),
        _fixed("card-tree", verify="tree", has_uncoupled=True),
        _fixed("card-best-first", verify="tree", growth="best-first"),
        BenchRow(
            name="card-turns-all-cores",
            drafter="turns",
            has_lengths=True,
            takes_options=True,
            draft={"verify": "tree"},
            is_best=False,
        ),
        BenchRow(name="card", drafter="own", is_tuned=True),
        BenchRow(
            name="card-writers", drafter="own", is_tuned=True, engine={"writers": ("beam", "suffix", "recycling")}
        ),
    ),
)
