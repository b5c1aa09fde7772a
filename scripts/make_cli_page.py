"""Write docs/cli.md from the commands' own --help texts; a test checks that the page is up to date.

python scripts/make_cli_page.py
"""

from __future__ import annotations

from pathlib import Path

from card.cli.main import cli

WIDTH = 110  # whatever the terminal's is
PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def cli_page() -> str:
    """Return the page: the group's help, then each command's."""
    parts = ["# The command `card`", "Made from `--help` by `scripts/make_cli_page.py`."]
    group = cli.make_context("card", [], resilient_parsing=True, terminal_width=WIDTH)
    texts = [("card", group.get_help())]
    for name, command in sorted(cli.commands.items()):
        context = command.make_context(name, [], parent=group, resilient_parsing=True, terminal_width=WIDTH)
        texts.append((f"card {name}", command.get_help(context)))
    for title, text in texts:
        parts += [f"## `{title}`", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
