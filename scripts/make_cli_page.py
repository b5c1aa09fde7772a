"""Write docs/cli.md from the commands' own options, each shared one once; a test checks that the page is up to date.

python scripts/make_cli_page.py
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from card.cli.main import cli
from card.cli.parts.sections import SECTIONS, is_common, section_of

WIDTH = 110  # columns of a line
NAME_WIDTH = 34  # columns for names; what is longer has a line of its own
SEVERAL = "; may be given several times"  # what --help says of an option that here has dots
BOUNDS = re.compile(r"; (\d+<=)?x[<>]=\d+(?=\])|  \[(\d+<=)?x[<>]=\d+\]")  # click's words for a range
OTHERS = "Output"  # the group of what has no section in --help
EVERYWHERE = frozenset({"help", "help_all"})  # said once, in the head
HEAD = """\
# The command `card`
Made by `scripts/make_cli_page.py`. Commands list own, then
[shared options](#shared-options). Brackets hold defaults; `...`: may be given several times. `--help-all`
shows every option. `-v` logs the drafter's events. [Pipes and Tab](README.md#pipes-and-tab).

Exit status: 0; 1 for a no of `card check-pair` or `card verify-server`, or if nobody reads the output;
2 for wrong input, in one line; 130 after Ctrl-C."""
PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


@dataclass(frozen=True, slots=True)
class Option:
    """An option as a command's help describes it."""

    group: str  # its section in --help
    names: str  # --target=TEXT, or --cache/--no-cache
    words: str
    default: str  # such as [4], or (required); empty if there is none

    @property
    def name(self) -> str:
        """The first long name alone, as the lists of a command show it."""
        return re.split(r"[=,/. ]", self.names)[0]


@dataclass(frozen=True, slots=True)
class Command:
    """A command, how it is called, and its options."""

    usage: str
    text: str
    options: tuple[Option, ...]


def cli_page() -> str:
    """Return the page: each command with what is its own, then the groups that several share."""
    commands = list(_commands(cli, "card", None))
    shared = shared_groups(commands)
    parts = [HEAD]
    for command in commands:
        parts += [f"## `{command.usage}`", command.text, *_own(command, shared), *_taken(command, shared)]
    parts.append("## Shared options")
    for title, options in shared.items():
        parts += [f"### {title}", _listed(options)]
    return "\n\n".join(parts) + "\n"


def shared_groups(commands: Sequence[Command]) -> dict[str, list[Option]]:
    """Return the options that several commands have in the same words, by group, with their most frequent default."""
    users: dict[str, Counter[tuple[str, str, str]]] = {}
    defaults: dict[tuple[str, str, str], Counter[str]] = {}
    for option in (one for command in commands for one in command.options):
        described = option.group, option.names, option.words
        users.setdefault(option.name, Counter())[described] += 1
        defaults.setdefault(described, Counter())[option.default] += 1
    groups: dict[str, list[Option]] = {title: [] for title in (*SECTIONS, OTHERS)}
    for described_by in users.values():
        (described, count), *_ = described_by.most_common(1)
        if count > 1:
            groups[described[0]].append(Option(*described, defaults[described].most_common(1)[0][0]))
    return {title: options for title, options in groups.items() if options}


def _commands(command: click.Command, name: str, parent: click.Context | None) -> Iterator[Command]:
    """Yield a command and those below it."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from _commands(command.commands[below], below, context)
        return
    arguments = [param.make_metavar(context) for param in command.params if isinstance(param, click.Argument)]
    text = command.get_short_help_str(WIDTH)
    yield Command(" ".join([context.command_path, *arguments]), text, tuple(_described(context, command.params)))


def _described(context: click.Context, params: Iterable[click.Parameter]) -> Iterator[Option]:
    """Yield the options as --help-all describes them, in the order of its sections."""
    for param in sorted(params, key=_place):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is None or param.name in EVERYWHERE or "--verbose" in param.opts:
            continue
        names, metavar = re.fullmatch(r"(.*?)(?: ([A-Z\[].*))?", record[0]).groups()  # type: ignore[union-attr]
        flags = names.replace(" / ", "/")
        words, _, default = BOUNDS.sub("", record[1]).partition("  [")
        value = ("=" if param.nargs == 1 else " ") + metavar.removesuffix(" RANGE") if metavar else ""
        dots = "..." if param.multiple else ""
        yield Option(
            group=section_of(param) or OTHERS,
            names=flags + value + dots,
            words=words.replace(SEVERAL, ""),
            default="(required)" if param.required else "[" * bool(default) + default.removeprefix("default: "),
        )


def _place(param: click.Parameter) -> tuple[int, bool]:
    section = section_of(param)
    return SECTIONS.index(section) if section else -1, not is_common(param)


def _own(command: Command, shared: Mapping[str, Sequence[Option]]) -> list[str]:
    """Return the options that only this command has in these words."""
    found = [one for one in command.options if not _is_shared(one, shared)]
    return [_listed(found)] if found else []


def _taken(command: Command, shared: Mapping[str, Sequence[Option]]) -> list[str]:
    """Return which shared options a command takes, and where their defaults are others here."""
    parts, others = [], []
    for title, options in shared.items():
        taken = [one for one in command.options if _is_shared(one, {title: options})]
        missing = [one.name for one in options if one.name not in {one.name for one in taken}]
        if not taken:
            continue
        if len(missing) < len(taken):
            parts.append(f"*{title}*" + (f" without {_names(missing)}" if missing else ""))
        else:
            parts.append(f"of *{title}* {_names([one.name for one in taken])}")
        usual = {one.name: one.default for one in options}
        others += [f"`{one.name}` {one.default or '[none]'}" for one in taken if one.default != usual[one.name]]
    text = f"Shared: {'; '.join(parts)}." + (f" Here: {', '.join(others)}." if others else "")
    return [_folded(text)] if parts else []


def _is_shared(option: Option, shared: Mapping[str, Sequence[Option]]) -> bool:
    return any((one.names, one.words) == (option.names, option.words) for one in shared.get(option.group, ()))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _listed(options: Iterable[Option]) -> str:
    """Return options as a block of text in two columns."""
    alike: dict[str, list[str]] = {}
    for option in options:
        alike.setdefault(f"{option.words} {option.default}".strip(), []).append(option.names)
    lines = []
    for words, several in alike.items():
        names = textwrap.wrap(", ".join(several), WIDTH, break_on_hyphens=False)
        folded = textwrap.wrap(words, WIDTH - NAME_WIDTH, break_on_hyphens=False)
        if len(names[-1]) < NAME_WIDTH - 1:
            names[-1] = names[-1].ljust(NAME_WIDTH) + folded.pop(0)
        lines += [*names, *(" " * NAME_WIDTH + line for line in folded)]
    return "```text\n" + "\n".join(lines) + "\n```"


def _folded(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
