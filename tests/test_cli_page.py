"""docs/cli.md is made of the commands' own options, and leaves none of them out."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

from card.cli.main import cli
from card.cli.parts.sections import SECTIONS, section_of

SCRIPT = Path(__file__).parents[1] / "scripts" / "make_cli_page.py"
PAGE = (Path(__file__).parents[1] / "docs" / "cli.md").read_text("utf-8")
MOST_WORDS = 2625  # of a page that is to be read
IN_HEAD = {"--help", "--help-all", "--verbose"}  # what every command takes


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_cli_page"] = module  # its dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for below, one in command.commands.items():
            yield from _commands(one, f"{name} {below}")
    else:
        yield name, command


def _section(title: str, level: str = "##") -> str:
    found = re.search(rf"^{level} {re.escape(title)}.*?(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {title}"
    return found[0]


def _options_of(name: str) -> set[str]:
    """Return the long options that the page gives a command: its own, and those of the groups that it takes."""
    own, _, taken = _section(f"`{name}").partition("\nShared: ")
    found = {flag for flags in _described(own) for flag in flags}
    for part in " ".join(taken.split()).split(" Here: ")[0].split(";"):
        names = set(re.findall(r"`(--[\w-]+)`", part))
        if group := re.search(r"\*([^*]+)\*", part):
            is_part = part.split()[0] == "of"
            found |= {
                flag
                for flags in _described(_section(group[1], "###"))
                for flag in flags
                if (flags[0] in names) == is_part
            }
    return found


def _described(text: str) -> list[list[str]]:
    """Return the long options of each line that begins with one."""
    return [re.findall(r"--[a-z][\w-]*", line.split("  ")[0]) for line in re.findall(r"^--.*", text, re.MULTILINE)]


@pytest.mark.parametrize(("name", "command"), list(_commands(cli, "card")), ids=str)
def test_every_option_of_a_command_is_found_by_its_section(name: str, command: click.Command) -> None:
    flags = {flag for param in command.params if isinstance(param, click.Option) for flag in _long(param)}
    found = _options_of(name)
    assert found == flags - IN_HEAD


def _long(param: click.Option) -> list[str]:
    return [flag for flag in (*param.opts, *param.secondary_opts) if flag.startswith("--")]


def test_an_option_that_several_commands_share_is_described_once() -> None:
    for words in ("Most new tokens.", "CPU cores of the target", "Most candidates verified in one target pass."):
        assert len(re.findall(re.escape(words), PAGE)) == 1


def test_cli_page_is_up_to_date_and_short_enough_to_read(script: ModuleType) -> None:
    assert script.cli_page() == PAGE, "run python scripts/make_cli_page.py"
    assert len(PAGE.split()) <= MOST_WORDS


def test_every_section_has_options_and_no_option_is_in_another() -> None:
    options = [one for _, command in _commands(cli, "card") for one in command.params]
    assert {section_of(one) for one in options} == {"", *SECTIONS}
