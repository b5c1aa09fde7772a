"""`card methods`: the available decoding methods, and the origin of each."""

from __future__ import annotations

import json

import click
from rich.console import Console

from card.cli.parts.tables import show, table
from card.config.registry import methods, origin_of


def run(as_json: bool) -> None:
    """Run `card methods`."""
    listed = [(name, method.summary, origin_of(name)) for name, method in methods().items()]
    if as_json:
        rows = [dict(zip(("method", "summary", "from"), row, strict=True)) for row in listed]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    made = table("method", "summary", "from")
    for row in listed:
        made.add_row(*row)
    show(Console(), made)
