"""A text of the built-in model that goes round in circles is shown up to one place, and the user learns why."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.cli.loops import LoopWatch
from tests.commands import Ran, run_command

UNMEASURED = ("--dtype", "float32", "--policy", "fixed", "--threads", "1")
LOOPING, KNOWS = "hi", "knows grade-school word problems only"


def end_in_pieces(text: str, cuts: list[int]) -> int | None:
    watch, done = LoopWatch(), 0
    places = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    for start, end in zip([0, *places], places, strict=False):
        if (found := watch.end_in(text[start:end])) is not None:
            return done + found
        done = end
    return None


@given(
    begin=st.text("ab", max_size=30),
    circle=st.text("abc", min_size=1, max_size=45),
    times=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 400)),
)
def test_a_loop_ends_at_the_same_character_in_whatever_pieces_it_comes(
    begin: str, circle: str, times: int, cuts: list[int]
) -> None:
    text = begin + circle * times
    end = end_in_pieces(text, cuts)
    assert end == end_in_pieces(text, [])
    if len(circle) <= 40 and len(circle) * times >= 120 + 40:
        assert end is not None
    if end is not None:
        assert any(text[end - 120 : end] == text[end - 120 - n : end - n] for n in range(1, 41))


@pytest.mark.parametrize("text", ["-" * 100, "2, 4, 6, 8, 10, " * 4, "".join(map(str, range(400)))])
def test_a_text_that_repeats_little_has_no_loop(text: str) -> None:
    assert end_in_pieces(text, []) is None


def generated(capsys: pytest.CaptureFixture[str], *options: str) -> Ran:
    ran = run_command(capsys, "generate", *options, *UNMEASURED)
    assert ran.status == 0, ran.err
    return ran


def test_the_built_in_model_is_left_where_it_repeats_itself_by_every_method_at_one_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = generated(capsys, LOOPING, "--method", "vanilla")
    drafted = generated(capsys, LOOPING, "--method", "suffix")
    long = generated(capsys, LOOPING, "--method", "vanilla", "--max-tokens", "300")
    assert plain.out == drafted.out
    assert long.out.startswith(plain.out.rstrip("\n")), "it is less of the same text"
    assert len(long.out) > len(plain.out), "who asks for a length gets it"
    for ran in (plain, drafted):
        assert "it repeats itself" in ran.err and KNOWS in ran.err.splitlines()[0]
    assert "it repeats itself" not in long.err


def test_the_readmes_first_line_asks_what_the_built_in_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    line = re.search(r"^card generate .*$", readme, re.MULTILINE)
    assert line is not None
    ran = generated(capsys, *shlex.split(line[0])[2:])
    assert ran.out.endswith("#### 16\n"), "she had 25, ate 3 and gave 6 away"
    assert KNOWS.removesuffix(" only") in ran.err
    assert "word problems only" in readme
