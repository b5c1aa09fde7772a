"""The words about one request's candidates: chain or tree, drafted or copied."""

from __future__ import annotations

import pytest

from card.cli.parts.stats_line import accepted_in_words, shape_in_words, stats_line
from card.engine.metrics import RequestStats


def test_the_shape_of_drafts_is_told_with_how_often_they_branched() -> None:
    assert shape_in_words(RequestStats()) == ""
    assert shape_in_words(RequestStats(drafted_chains=4)) == "a chain"
    assert shape_in_words(RequestStats(drafted_chains=4, drafted_trees=12)) == "a tree in 12 of 16 passes"
    assert shape_in_words(RequestStats(drafted_chains=4, drafted_trees=1)) == "a chain in 4 of 5 passes"


@pytest.mark.parametrize(
    ("accepted", "words"),
    [
        ({}, "accepted 0"),
        ({"suffix": 2, "beam": 1}, "accepted 3: 33% drafted (beam 1), 67% copied (suffix 2)"),
        (
            {"beam": 5, "beam+suffix": 3, "suffix": 1, "grammar": 1},
            "accepted 10: 80% drafted (beam 5, beam+suffix 3), 10% copied (suffix 1), 10% forced (grammar 1)",
        ),
        (
            {"beam": 1, "suffix+grammar": 1, "echo": 2},
            "accepted 4: 25% drafted (beam 1), 25% copied (suffix+grammar 1), 50% of other writers (echo 2)",
        ),
    ],
)
def test_accepted_candidates_are_told_by_who_wrote_them(accepted: dict[str, int], words: str) -> None:
    stats = RequestStats(accepted_by_writer=accepted, accepted_tokens=sum(accepted.values()))
    assert accepted_in_words(stats) == words


def test_without_a_drafter_there_is_no_shape_and_nothing_drafted() -> None:
    stats = RequestStats(verified_by_writer={"echo": 3}, accepted_by_writer={"echo": 2}, accepted_tokens=2)
    line = stats_line("suffix", stats, None)
    assert "accepted from echo 2" in line and "drafted" not in line and "schedule" not in line
