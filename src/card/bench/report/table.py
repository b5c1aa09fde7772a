"""The figures of runs as text: cells for people, and CSV for programs."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TextIO

from card.bench.names import OTHER_NUMBERS
from card.bench.records import Check, Pair, RowFacts, Run
from card.bench.report.charts import in_words
from card.bench.summary import Costs, Percentiles, RowSummary, Spread

Summaries = Sequence[tuple[Run, Sequence[RowSummary]]]
_SHOWN_SHARE = 0.05  # of a writer, in tables
_SPREADS = ("tokens_per_s", "wall_tokens_per_s", "speedup")
_PERCENTILES = ("first_token", "inter_token")
_FACTS = (
    "run_id",
    "date",
    "commit",
    "status",
    "dtype",
    "temperature",
    "max_tokens",
    "pair",
    "target",
    "draft",
    "target_cost",
    "row",
    "method",
    "cores",
    "is_exact",
    "is_comparable",
    "num_texts_equal",
    "workload",
    "num_prompts",
    "num_repeats",
    "num_tokens",
)


def write_csv(file: TextIO, summaries: Summaries) -> None:
    """Write a line for each pair, row and workload of the runs; units are in the names, what is missing is empty."""
    names = [*_FACTS]
    names += [f"{name}_{part}" for name in _SPREADS for part in ("median", "least", "most")]
    names += [f"{name}_{part}_s" for name in _PERCENTILES for part in ("p50", "p90", "p99")]
    names += [field.name for field in fields(Costs)]
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for run, rows in summaries:
        for row in rows:
            writer.writerow(_record(run, row))


def _record(run: Run, row: RowSummary) -> dict[str, Any]:
    """Return one line of the CSV."""
    pair, facts = pair_of(run, row.pair), facts_of(run, row.row)
    check = run.check_of(pair=row.pair, row=row.row, workload=row.workload)
    record: dict[str, Any] = {name: getattr(run, name) for name in ("run_id", "date", "commit", "status", "dtype")}
    record |= {"temperature": run.sampling.temperature, "max_tokens": run.max_tokens}
    record |= {"target": pair.target, "draft": pair.draft, "target_cost": pair.target_cost, "method": facts.method}
    record |= {"cores": _joined(facts.cores), "is_exact": facts.is_exact, "is_comparable": facts.is_comparable}
    record["num_texts_equal"] = check.num_equal if check else None
    for name in ("pair", "row", "workload", "num_prompts", "num_repeats", "num_tokens"):
        record[name] = getattr(row, name)
    for name in _SPREADS:
        spread: Spread | None = getattr(row, name)
        record |= {f"{name}_{part}": getattr(spread, part, None) for part in ("median", "least", "most")}
    for name in _PERCENTILES:
        found: Percentiles | None = getattr(row, name)
        record |= {f"{name}_{part}_s": getattr(found, part, None) for part in ("p50", "p90", "p99")}
    return record | {field.name: _joined(getattr(row.costs, field.name)) for field in fields(Costs)}


def _joined(value: object) -> object:
    """Return a list or a table as one cell."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={one}" for name, one in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def pair_of(run: Run, name: str) -> Pair:
    """Return the pair of this name."""
    return next(pair for pair in run.pairs if pair.name == name)


def facts_of(run: Run, name: str) -> RowFacts:
    """Return what the run says of the row of this name."""
    return next(row for row in run.rows if row.name == name)


def cells(run: Run, row: RowSummary) -> dict[str, str]:
    """Return what a table shows of a row, by column; a dash for what it does not have."""
    costs, rate = row.costs, row.tokens_per_s
    check = run.check_of(pair=row.pair, row=row.row, workload=row.workload)
    return {
        "method": row.row,
        "tokens/s": f"{rate.median:.1f} ({rate.least:.1f}–{rate.most:.1f})",
        "speed-up": in_words(row.speedup) if row.speedup else "–",
        "tokens a pass": _shown(costs.mean_acceptance_length, ".2f"),
        "hit rate": _shown(costs.hit_rate, ".0%"),
        "drafter layers/s": _shown(costs.drafter_layers_per_s, ".0f"),
        "of ceiling": _shown(costs.ceiling_share, ".0%"),
        "verified per token": _shown(costs.verified_per_emitted, ".2f"),
        "rolled back per token": _shown(costs.rolled_back_per_emitted, ".2f"),
        "target passes": f"{costs.target_passes:,}",
        "drafter passes": _shown(costs.drafter_passes, ",d"),
        "first token, ms (p50 / p90 / p99)": _milliseconds(row.first_token),
        "between tokens, ms (p50 / p90 / p99)": _milliseconds(row.inter_token),
        "target pass, ms": _shown(costs.target_pass_ms, ".2f"),
        "overhead a round, ms": _shown(costs.round_overhead_ms, ".2f"),
        "accepted from": _by_writer(costs.accepted_by_writer),
        "same text": _same_text(facts_of(run, row.row), check),
    }


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _milliseconds(found: Percentiles | None) -> str:
    return "–" if found is None else " / ".join(f"{1e3 * value:.1f}" for value in (found.p50, found.p90, found.p99))


def _by_writer(shares: Mapping[str, float] | None) -> str:
    named = [f"{name} {share:.0%}" for name, share in (shares or {}).items() if share >= _SHOWN_SHARE]
    return ", ".join(named) or "–"


def _same_text(facts: RowFacts, check: Check | None) -> str:
    """Return in a few words how a row's texts compare with the baseline's."""
    if not facts.is_exact:
        return "no: not an exact method"
    if not facts.is_comparable:
        return OTHER_NUMBERS
    if check is None:
        return "not compared"
    if check.num_equal == check.num_texts:
        return f"yes, all {check.num_texts}"
    return f"{check.num_equal} of {check.num_texts}, the others part at near-ties"
