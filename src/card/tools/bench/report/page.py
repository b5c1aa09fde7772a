"""The report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from card.tools.bench.records import Run
from card.tools.bench.report.charts import charts_of
from card.tools.bench.report.headline import headlines
from card.tools.bench.report.table import Summaries, in_words
from card.tools.bench.summary import RowSummary, Spread
from card.tools.bench.tables import cells


def render(summaries: Summaries) -> str:
    """Return the page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    names = dict.fromkeys(pair.name for run, _ in summaries for pair in run.pairs)
    return template.render(
        title=f"Measured: {', '.join(names)}",
        runs=[_facts_of_run(run, rows, f"run {run.run_id}" if len(summaries) > 1 else "") for run, rows in summaries],
    )


def _facts_of_run(run: Run, rows: Sequence[RowSummary], title: str) -> dict[str, Any]:
    """Return the figures of a run for the page; it has a title where there are several runs."""
    by_workload = groupby(rows, key=lambda row: (row.pair, row.workload))
    return {
        "id": run.run_id,
        "title": title,
        "is_complete": run.status == "complete",
        "baseline": run.baseline,
        "headlines": [(first, " ".join(others)) for first, *others in headlines(run, rows)],
        "overviews": list(_overviews(run, rows)),
        "sections": [_section(run, list(group), ", ".join(filter(None, (*key, title)))) for key, group in by_workload],
        "facts": _facts(run),
    }


def _section(run: Run, rows: Sequence[RowSummary], title: str) -> dict[str, Any]:
    return {
        "title": title,
        "notes": list(_notes(run, rows)),
        "charts": charts_of(rows, run.baseline),
        "rows": [(cells(run, row), _is_loss(row.speedup)) for row in rows],
    }


def _is_loss(speedup: Spread | None) -> bool:
    return speedup is not None and speedup.median < 1


def _facts(run: Run) -> dict[str, str]:
    """Return the facts needed to trust and to repeat a run."""
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
        if pair.draft_bytes is not None:
            draft += f", of which a step reads {pair.draft_bytes / 1e6:.1f} MB"
        inflated = f"; target costs {pair.target_cost}" if pair.target_cost else ""
        facts[f"pair {pair.name}"] = f"target {pair.target} of {parameters}{draft}{inflated}"
    for workload in run.workloads:
        facts[f"workload {workload.name}"] = f"{workload.num_prompts} prompts, source: {workload.source}"
    return facts


def _overviews(run: Run, rows: Sequence[RowSummary]) -> Iterator[dict[str, Any]]:
    """Yield the speed-ups of each pair by row, with a column for each workload; nothing for a pair without them."""
    for pair, group in groupby(rows, key=lambda row: row.pair):
        speedups = {(row.row, row.workload): row.speedup for row in group}
        workloads = list(dict.fromkeys(workload for _, workload in speedups))
        names = [name for name in dict.fromkeys(name for name, _ in speedups) if name != run.baseline]
        lines = {name: [speedups.get((name, workload)) for workload in workloads] for name in names}
        shown = {name: [(in_words(one) if one else "–", _is_loss(one)) for one in line] for name, line in lines.items()}
        if names:
            yield {"pair": pair, "columns": workloads, "rows": shown}


def _notes(run: Run, rows: Sequence[RowSummary]) -> Iterator[str]:
    """Yield the notes that a reader needs besides the figures."""
    if cost := run.pair_of(rows[0].pair).target_cost:
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
