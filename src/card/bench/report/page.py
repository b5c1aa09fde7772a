"""The report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from card.bench.records import Run
from card.bench.report.charts import charts_of, in_words
from card.bench.report.headline import headlines
from card.bench.report.style import COLOURS, Chart, as_svg
from card.bench.report.table import Summaries, cells
from card.bench.report.timeline import Timeline, draw_timeline
from card.bench.summary import RowSummary, Spread


@dataclass(frozen=True, slots=True)
class Section:
    """One pair on one workload: its plots and its rows."""

    run: Run
    pair: str
    where: str  # in words
    rows: tuple[RowSummary, ...]
    charts: tuple[Chart, ...]


def sections_of(summaries: Summaries) -> list[Section]:
    """Return plots and rows of each pair and workload, in the runs' order. Raises: BenchError without matplotlib."""
    sections = []
    for run, rows in summaries:
        for (pair, workload), group in groupby(rows, key=lambda row: (row.pair, row.workload)):
            own, where = tuple(group), f"{pair}, {workload}"
            if len(summaries) > 1:
                where += f", run {run.run_id}"
            sections.append(Section(run, pair, where, own, tuple(charts_of(own, where, run.baseline))))
    return sections


def render(summaries: Summaries, sections: Sequence[Section], timelines: Sequence[tuple[Timeline, Chart]]) -> str:
    """Return the page. ``sections`` are those of `sections_of`."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    numbers = iter(range(1 << 30))

    def svg(chart: Chart) -> Markup:
        return Markup(as_svg(chart, f"p{next(numbers)}-"))

    return template.render(
        title=_title(summaries),
        runs=[_run_facts(run) for run, _ in summaries],
        headlines=[
            {"run_id": run.run_id if len(summaries) > 1 else "", "first": first, "others": " ".join(others)}
            for run, rows in summaries
            for first, *others in headlines(run, rows)
        ],
        overviews=[overview for run, rows in summaries for overview in _overviews(run, rows)],
        sections=[
            {
                "title": section.where,
                "charts": [{"svg": svg(chart), "alt": chart.alt} for chart in section.charts],
                "columns": list(cells(section.run, section.rows[0])),
                "rows": [
                    {"cells": list(cells(section.run, row).values()), "is_loss": _is_loss(row.speedup)}
                    for row in section.rows
                ],
                "notes": list(_notes(section)),
            }
            for section in sections
        ],
        timelines=[{"svg": svg(chart), "alt": chart.alt, "title": chart.title} for _, chart in timelines],
        colours=COLOURS,
    )


def draw_timelines(timelines: Sequence[Timeline]) -> list[tuple[Timeline, Chart]]:
    """Return each timeline with its plot. Raises: BenchError without matplotlib."""
    return [(timeline, draw_timeline(timeline)) for timeline in timelines]


def _title(summaries: Summaries) -> str:
    names = dict.fromkeys(pair.name for run, _ in summaries for pair in run.pairs)
    return f"Measured: {', '.join(names)}"


def _is_loss(speedup: Spread | None) -> bool:
    return speedup is not None and speedup.median < 1


def _run_facts(run: Run) -> dict[str, Any]:
    """Return what must be known of a run to trust and to repeat it."""
    machine = {key: value for key, value in run.machine.items() if not isinstance(value, dict | list)}
    sampling = run.sampling
    params = f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}"
    facts = {
        "command": run.command,
        "commit": run.commit,
        "date": run.date,
        "machine": ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items()),
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "number format": run.dtype,
        "sampling": f"{params}, min-p {sampling.min_p:g}, seed {sampling.seed}; at most {run.max_tokens} new tokens",
        "repeats": str(run.repeats),
        "baseline": run.baseline,
    }
    for pair in run.pairs:
        parameters = f"{pair.target_parameters / 1e6:.1f}M parameters"
        draft = f", draft {pair.draft} of {(pair.draft_parameters or 0) / 1e6:.1f}M" if pair.draft else ""
        inflated = f"; target costs {pair.target_cost}" if pair.target_cost else ""
        facts[f"pair {pair.name}"] = f"target {pair.target} of {parameters}{draft}{inflated}"
    for workload in run.workloads:
        facts[f"workload {workload.name}"] = f"{workload.num_prompts} prompts, source: {workload.source}"
    return {"run_id": run.run_id, "facts": facts, "is_complete": run.status == "complete"}


def _overviews(run: Run, rows: Sequence[RowSummary]) -> Iterator[dict[str, Any]]:
    """Yield the speed-ups of each pair by row, with a column for each workload; nothing of a pair that has none."""
    for pair, group in groupby(rows, key=lambda row: row.pair):
        found = {(row.row, row.workload): row.speedup for row in group}
        workloads = list(dict.fromkeys(workload for _, workload in found))
        names = [name for name in dict.fromkeys(name for name, _ in found) if name != run.baseline]
        if names:
            yield {
                "run_id": run.run_id,
                "baseline": run.baseline,
                "pair": pair,
                "columns": workloads,
                "rows": [
                    {"name": name, "cells": [_cell(found.get((name, workload))) for workload in workloads]}
                    for name in names
                ],
            }


def _cell(speedup: Spread | None) -> dict[str, Any]:
    return {"text": in_words(speedup) if speedup else "–", "is_loss": _is_loss(speedup)}


def _notes(section: Section) -> Iterator[str]:
    """Yield what a reader must know besides the figures."""
    run, rows = section.run, section.rows
    if cost := run.pair_of(section.pair).target_cost:
        yield f"Inflated target: it costs {cost}."
    others = [row.row for row in rows if not run.facts_of(row.row).is_comparable]
    inexact = [row.row for row in rows if not run.facts_of(row.row).is_exact]
    slower = [row.row for row in rows if _is_loss(row.speedup)]
    for note, names in (
        ("Drawn or computed with other numbers, so that the text is another one", others),
        ("Not exact, the text may differ from plain decoding", inexact),
        (f"Slower than {run.baseline}", slower),
    ):
        if names:
            yield f"{note}: {', '.join(names)}."
