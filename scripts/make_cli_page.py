"""Write docs/cli.md from the commands' own --help-all texts; a test checks that the page is up to date.

python scripts/make_cli_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from card.cli.help import full_help
from card.cli.main import cli

WIDTH = 110  # whatever the terminal's is
HEAD = """\
# The command `card`
Made from `--help-all` by `scripts/make_cli_page.py`; `--help` shows the common options alone. `python -m card` is the
same command. Every command takes `-v`, before or after its name.

Exit status: 0; 1 for the no of `card check-pair`, if answers differ in `card verify-server`, and if the reader of the
output has gone; 2 for what is wrong with the input, with one line on standard error; 130 after Ctrl-C.

Tab completes commands and options once the shell knows of it:
```
eval "$(_CARD_COMPLETE=bash_source card)"               # in ~/.bashrc
eval "$(_CARD_COMPLETE=zsh_source card)"                # in ~/.zshrc
_CARD_COMPLETE=fish_source card | source                # in ~/.config/fish/config.fish
```"""
PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def cli_page() -> str:
    """Return the page: each group's help, then those of its commands."""
    parts = [HEAD]
    for title, text in _help_texts(cli, "card", None):
        parts += [f"## `{title}`", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def _help_texts(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """Yield how a command is called and its help, and the same of the commands below it."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True, terminal_width=WIDTH)
    yield context.command_path, full_help(command, context)
    if isinstance(command, click.Group):
        for below, one in sorted(command.commands.items()):
            yield from _help_texts(one, below, context)


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
