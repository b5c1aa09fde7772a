"""`card pairs`: targets on the hub with a known draft model."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console

from card.cli.parts.tables import show, table
from card.models.files.known_pairs import KNOWN_PAIRS, gigabytes

_SPARE = ("quantisation", "licence")


def run(as_json: bool, wide: bool) -> None:
    """Run `card pairs`."""
    if as_json:
        click.echo(json.dumps([asdict(pair) for pair in KNOWN_PAIRS], ensure_ascii=False))
        return
    made = table("target", "draft", numbers=("files", "memory"))
    for head in _SPARE:
        made.add_column(head)
    for pair in KNOWN_PAIRS:
        sizes = (gigabytes(pair.num_bytes), gigabytes(pair.memory_bytes))
        bits = dict.fromkeys((pair.target.quantisation, pair.draft.quantisation))
        made.add_row(pair.target.repository, pair.draft.model, *sizes, ", ".join(bits), ", ".join(pair.licences))
    show(Console(), made, spare=_SPARE, is_wide=wide)
    click.echo(f"\nOne command does it: card chat {KNOWN_PAIRS[0].target.repository}")
