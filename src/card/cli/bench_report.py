"""`card report`: bench files in; a page and a table out."""

from __future__ import annotations

from pathlib import Path

import click

from card.bench.report.page import render
from card.bench.report.table import write_csv
from card.bench.results import load
from card.bench.summary import summarise
from card.errors import BenchError, SettingsError


def run(results: tuple[Path, ...], out: Path | None, csv_path: Path | None) -> None:
    """Do what `card report` was asked for."""
    if out is None and csv_path is None:
        raise SettingsError("nothing to write: give --out report.html or --csv file")
    summaries = [(run, summarise(run)) for run in load(results)]
    if not any(rows for _, rows in summaries):
        raise BenchError(f"{results[0]} holds no prompt that every row has answered; let card bench finish it")
    for path, write in ((csv_path, write_csv), (out, lambda file, summaries: file.write(render(summaries)))):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", newline="") as file:
                write(file, summaries)
        except OSError as error:
            raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
        click.echo(f"wrote {path}", err=True)
