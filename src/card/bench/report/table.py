"""The figures of runs as text: cells for people, and CSV for programs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TextIO

from card.bench import tables
from card.bench.records import Run
from card.bench.summary import Costs, Percentiles, RowSummary, Spread

Summaries = Sequence[tuple[Run, Sequence[RowSummary]]]
_SPREADS = (("median", "least", "most"), "", ("tokens_per_s", "wall_tokens_per_s", "speedup"))
_PERCENTILES = (("p50", "p90", "p99"), "_s", ("first_token", "inter_token"))


def write_csv(file: TextIO, summaries: Summaries) -> None:
    """Write a line for each pair, row and workload of the runs; units are in the names, what is missing is empty."""
    records = [_record(run, row) for run, rows in summaries for row in rows]
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)


def _record(run: Run, row: RowSummary) -> dict[str, Any]:
    """Return one line of the CSV."""
    pair, facts = run.pair_of(row.pair), run.facts_of(row.row)
    check = run.check_of(pair=row.pair, row=row.row, workload=row.workload)
    record: dict[str, Any] = {name: getattr(run, name) for name in ("run_id", "date", "commit", "status", "dtype")}
    record |= {"temperature": run.sampling.temperature, "max_tokens": run.max_tokens}
    record |= {"pair": row.pair, "target": pair.target, "draft": pair.draft, "target_cost": pair.target_cost}
    record |= {"row": row.row, "method": facts.method, "cores": _joined(facts.cores)}
    record |= {"is_exact": facts.is_exact, "is_comparable": facts.is_comparable}
    record |= {"num_texts_equal": check.num_equal if check else None, "workload": row.workload}
    record |= {name: getattr(row, name) for name in ("num_prompts", "num_repeats", "num_tokens")}
    for parts, unit, names in (_SPREADS, _PERCENTILES):
        for name in names:
            record |= {f"{name}_{part}{unit}": getattr(getattr(row, name), part, None) for part in parts}
    return record | {field.name: _joined(getattr(row.costs, field.name)) for field in fields(Costs)}


def _joined(value: object) -> object:
    """Return a list or a table as one cell."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={one}" for name, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def cells(run: Run, row: RowSummary) -> dict[str, str]:
    """Return what a table shows of a row, by column; a dash for what it does not have."""
    costs, known = row.costs, tables.cells(run, row)
    return {
        "method": known["method"],
        "tokens/s": f"{known['tokens/s']} ({known['range']})",
        "speed-up": in_words(row.speedup) if row.speedup else "–",
        **{name: known[name] for name in ("tokens a pass", "hit rate", "layers/s", "of ceiling")},
        **{name: known[name] for name in ("verified per token", "rolled back per token")},
        "target passes": f"{costs.target_passes:,}",
        "drafter passes": tables.shown(costs.drafter_passes, ",d"),
        "first token, ms (p50 / p90 / p99)": _milliseconds(row.first_token),
        "between tokens, ms (p50 / p90 / p99)": _milliseconds(row.inter_token),
        **{name: known[name] for name in ("pass, ms", "overhead, ms", "accepted from", "same text")},
    }


def _milliseconds(found: Percentiles | None) -> str:
    return "–" if found is None else " / ".join(f"{1e3 * value:.1f}" for value in (found.p50, found.p90, found.p99))


def in_words(speedup: Spread) -> str:
    """Return a speed-up with its range, and that it is none."""
    words = f"{speedup.median:.2f}× ({speedup.least:.2f}–{speedup.most:.2f})"
    return words if speedup.median >= 1 else f"{words} slower"
