"""`card report`: bench files in; tables, a page and a file of all figures out."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from card.cli.parts.files import writing
from card.cli.parts.tables import show
from card.errors import BenchError
from card.tools.bench.report.page import render
from card.tools.bench.report.table import write_csv
from card.tools.bench.results import load
from card.tools.bench.summary import summarise
from card.tools.bench.tables import SPARE, rich_tables


def run(results: tuple[Path, ...], out: Path | None, csv_path: Path | None) -> None:
    """Run `card report`."""
    summaries = [(run, summarise(run)) for run in load(results)]
    if not any(rows for _, rows in summaries):
        raise BenchError(f"{results[0]} holds no prompt that every row has answered; let card bench finish it")
    for path, write in ((csv_path, write_csv), (out, lambda file, summaries: file.write(render(summaries)))):
        if path is None:
            continue
        with writing(path) as place, place.open("w", encoding="utf-8", newline="") as file:
            write(file, summaries)
        click.echo(f"wrote {path}", err=True)
    if out is None:
        for one, _ in summaries:
            for shown in rich_tables(one):
                show(Console(), shown, spare=SPARE)
