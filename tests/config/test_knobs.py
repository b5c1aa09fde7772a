"""Names with numbers behind them: what is the name, which numbers are given, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from card.config.knobs import NamedKind, parse_named
from card.errors import SettingsError

KIND = NamedKind("judge", "relaxed:0.5")


@pytest.mark.parametrize(
    ("text", "most", "name", "numbers"),
    [
        ("sparse", 2, "sparse", ()),
        ("sparse:0.1", 2, "sparse", ("0.1",)),
        ("sparse:0.1:64", 2, "sparse", ("0.1", "64")),
        ("a:1:2:3", 2, "a:1", ("2", "3")),
        ("c:/judge.safetensors:0.2", 1, "c:/judge.safetensors", ("0.2",)),
        ("relaxed:", 1, "relaxed", ("",)),
    ],
)
def test_numbers_are_what_stands_behind_the_last_colons(
    text: str, most: int, name: str, numbers: tuple[str, ...]
) -> None:
    found = parse_named(text, most)
    assert (found.name, found.numbers) == (name, numbers)


def test_a_number_that_is_left_out_is_the_usual_one_and_what_is_none_is_told_apart() -> None:
    found = parse_named("sparse:0.1:6.4", 2)
    assert found.number(0, 0.5, float) == 0.1
    assert found.number(1, 128, int) is None
    assert found.number(2, 7, int) == 7


def test_a_name_that_is_not_known_is_refused_unless_it_ends_like_a_file() -> None:
    assert KIND.parse("fly:0.7", {"fly"}).name == "fly"
    assert KIND.parse("some/judge.safetensors", {"fly"}).numbers == ()
    with pytest.raises(SettingsError, match=r"unknown judge 'flies'; known: fly, .*relaxed:0\.5, .*card train judge"):
        KIND.parse("flies:0.7", {"fly"})
    KIND.check_file(Path("judge.safetensors"))
    with pytest.raises(
        SettingsError, match=r"the file of a judge must end in \.safetensors, got judge\.bin; rename it"
    ):
        KIND.check_file(Path("judge.bin"))
