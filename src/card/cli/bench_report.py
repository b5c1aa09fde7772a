"""`card report`: bench files in; a page, pictures and a table out."""

from __future__ import annotations

from pathlib import Path

import click

from card.bench.report.page import draw_timelines, render, sections_of
from card.bench.report.style import write_png
from card.bench.report.table import write_csv
from card.bench.report.timeline import read_timelines
from card.bench.results import load
from card.bench.summary import summarise
from card.errors import BenchError, SettingsError


def run(
    results: tuple[Path, ...], out: Path | None, png: Path | None, csv_path: Path | None, trace: Path | None
) -> None:
    """Do what `card report` was asked for."""
    if out is None and png is None and csv_path is None:
        raise SettingsError("nothing to write: give --out report.html, --png folder or --csv file")
    summaries = [(run, summarise(run)) for run in load(results)]
    if not any(rows for _, rows in summaries):
        raise BenchError(f"{results[0]} holds no prompt that every row has answered; let card bench finish it")
    timelines = read_timelines(trace) if trace is not None else []
    try:
        if csv_path is not None:
            with _fresh(csv_path).open("w", encoding="utf-8", newline="") as file:
                write_csv(file, summaries)
        if out is not None or png is not None:
            sections, drawn = sections_of(summaries), draw_timelines(timelines)
            if out is not None:
                _fresh(out).write_text(render(summaries, sections, drawn), encoding="utf-8")
            if png is not None:
                charts = [chart for section in sections for chart in section.charts] + [chart for _, chart in drawn]
                for chart in charts:
                    write_png(chart, _fresh(png / f"{chart.name}.png"))
    except OSError as error:
        raise SettingsError(f"{error.filename or 'the report'} cannot be written: {error.strerror}") from error
    for path in (out, png, csv_path):
        if path is not None:
            click.echo(f"wrote {path}", err=True)


def _fresh(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
