"""The figures of runs as CSV, and speed-ups in words."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TextIO

from card.tools.bench.records import Run
from card.tools.bench.summary import CostSummary, RowSummary, Spread

Summaries = Sequence[tuple[Run, Sequence[RowSummary]]]
_SPREADS = (("median", "least", "most"), "", ("tokens_per_s", "wall_tokens_per_s", "speedup"))
_PERCENTILES = (("p50", "p90", "p99"), "_s", ("first_token", "inter_token"))


def write_csv(file: TextIO, summaries: Summaries) -> None:
    """Write a line for each pair, row and workload; units are in the names, and missing values are empty."""
    records = [_record(run, row) for run, rows in summaries for row in rows]
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)


def _record(run: Run, row: RowSummary) -> dict[str, Any]:
    """Return one line of the CSV."""
    pair, facts = run.pair_of(row.pair), run.facts_of(row.row)
    check = run.check_of(row.group)
    record: dict[str, Any] = {name: getattr(run, name) for name in ("run_id", "date", "commit", "status", "dtype")}
    record |= {"temperature": run.sampling.temperature, "max_tokens": run.max_tokens}
    record |= {"pair": row.pair, "target": pair.target, "draft": pair.draft, "target_cost": pair.target_cost}
    record |= {"row": row.row, "method": facts.method, "cores": _joined(facts.cores)}
    record |= {"is_exact": facts.is_exact, "is_comparable": facts.is_comparable}
    record |= {"num_texts_equal": check.num_equal if check else None, "workload": row.workload}
    record |= {name: getattr(row, name) for name in ("num_prompts", "num_repeats", "num_tokens")}
    for name in ("solved", "same_number"):
        record |= {
            name: getattr(getattr(row, name), "count", None),
            f"{name}_of": getattr(getattr(row, name), "of", None),
        }
    for parts, unit, names in (_SPREADS, _PERCENTILES):
        for name in names:
            record |= {f"{name}_{part}{unit}": getattr(getattr(row, name), part, None) for part in parts}
    return record | {field.name: _joined(getattr(row.costs, field.name)) for field in fields(CostSummary)}


def _joined(value: object) -> object:
    """Return a list or a table as one cell."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={one}" for name, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def in_words(speedup: Spread) -> str:
    """Return a speed-up with its range in words, and whether it is a slowdown."""
    words = f"{speedup.median:.2f}× ({speedup.least:.2f}–{speedup.most:.2f})"
    return words if speedup.median >= 1 else f"{words} slower"
