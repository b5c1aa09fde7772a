"""Lines that a user types in `card chat` become turns: of one line or several, or commands."""

from __future__ import annotations

import pytest

from card.cli.turns import Turn, read_turns


def turns_of(*lines: str) -> list[Turn]:
    typed = iter(lines)
    return list(read_turns(lambda _: next(typed, None)))


def said(*texts: str) -> list[Turn]:
    return [Turn(text) for text in texts]


def test_each_line_is_a_turn_and_empty_ones_are_none() -> None:
    assert turns_of("one", "", "  ", " two ") == said("one", "two")


def test_a_line_that_ends_with_a_backslash_goes_on() -> None:
    assert turns_of("one\\", "two \\", "", "three") == said("one\ntwo", "three")
    assert turns_of("one\\") == said("one"), "the end of the input ends it too"


def test_fences_hold_a_block_of_lines() -> None:
    assert turns_of('"""one', "", '  two"""', "three") == said("one\n\n  two", "three")
    assert turns_of('"""', "one\\", "/quit", '"""') == said("one\\\n/quit")
    assert turns_of('"""one"""', '"""', "two") == said("one", "two"), "the end of the input closes a block"
    assert turns_of('say """ twice') == said('say """ twice')


def test_a_paste_of_several_lines_is_one_turn_whatever_it_looks_like() -> None:
    assert turns_of('"""Docs."""\nimport os\n\nx = 1 \\\n', "/quit\nnow") == said(
        '"""Docs."""\nimport os\n\nx = 1 \\', "/quit\nnow"
    )


def test_the_next_line_of_a_turn_is_asked_for_differently() -> None:
    shown, typed = [], iter(["one\\", "two", '"""', '"""'])

    def ask(before: str) -> str | None:
        shown.append(before)
        return next(typed, None)

    list(read_turns(ask))
    assert shown == ["> ", "... ", "> ", "... ", "> "]


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        ("/quit", Turn("", "/quit")),
        ("/foo bar", Turn("bar", "/foo")),
        ("/System  Be short. ", Turn("Be short.", "/system")),
        ("/etc/hosts is what?", Turn("/etc/hosts is what?")),
        ("/* a comment */", Turn("/* a comment */")),
        ("/2 is half", Turn("/2 is half")),
        ('"""/foo bar"""', Turn("/foo bar")),
    ],
)
def test_a_line_that_begins_with_a_slash_and_a_word_is_a_command(line: str, turn: Turn) -> None:
    assert turns_of(line) == [turn]


def test_a_system_prompt_may_have_several_lines() -> None:
    wanted = [Turn("one\ntwo", "/system")]
    assert turns_of('/system """one', 'two"""') == turns_of("/system one\\", "two") == wanted
