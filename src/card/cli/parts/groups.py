"""Groups of commands, each of which is imported when it is used."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import click

from card.cli.parts.command import VERBOSE
from card.config.record import Command
from card.config.registry import commands
from card.machine.importing import load_place


class _Imported(MutableMapping[str, click.Command]):
    """The commands of a table by name; each is imported when it is read."""

    def __init__(self, table: dict[str, Command]) -> None:
        self._table = table
        self._added: dict[str, click.Command] = {}  # added through click

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._added:
            self._added[name] = load_place(self._table[name].place)
        return self._added[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._table[name] = Command(name, command.get_short_help_str(), "")
        self._added[name] = command

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


class CardGroup(click.Group):
    """A group of such commands; each is imported when it is used."""

    def __init__(self, *args: Any, own: Sequence[Command] = (), under: str = "", **settings: Any) -> None:
        """Include the group's own commands, which come first, and those that records have under its name."""
        super().__init__(*args, **settings)
        self.params.append(VERBOSE)
        self._table = {one.name: one for one in own} | commands(under)
        self.commands = _Imported(self._table)

    def list_commands(self, _: click.Context | None = None) -> list[str]:
        """Return the names in order, the most used first."""
        return list(self.commands)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.summary + one.needs) for name, one in self._table.items()])

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Take a group without anything else as a question for its help."""
        return super().parse_args(context, args or ["--help"])

    def invoke(self, context: click.Context) -> Any:
        """Run a command; Ctrl-C must not reach click, which would write an empty line to standard error."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupt:
            raise click.Abort from interrupt
