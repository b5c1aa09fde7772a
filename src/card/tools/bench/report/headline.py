"""The results in sentences: the fastest method, its gain over plain decoding, and the losses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from card.tools.bench.records import Run, busy_load
from card.tools.bench.summary import RowSummary, Spread

_Table = Mapping[str, Mapping[str, Spread]]  # by row, then by workload: speed relative to the baseline


def headlines(run: Run, rows: Sequence[RowSummary]) -> Iterator[list[str]]:
    """Yield sentences on each pair: first the fastest method, then the losses.

    Speed-ups are the medians of repeats; over several workloads the fastest is the one with the largest geometric mean.
    A pair without speed-ups is left out.
    """
    for pair, group in groupby(rows, key=lambda row: row.pair):
        table: dict[str, dict[str, Spread]] = {}
        for row in group:
            if row.speedup is not None and row.row != run.baseline:
                table.setdefault(row.row, {})[row.workload] = row.speedup
        if table:
            yield list(_sentences(run, pair, table))


def _sentences(run: Run, pair: str, table: _Table) -> Iterator[str]:
    workloads = list(dict.fromkeys(workload for speedups in table.values() for workload in speedups))
    whole = {name: speedups for name, speedups in table.items() if len(speedups) == len(workloads)}
    exact = {name: speedups for name, speedups in whole.items() if run.facts_of(name).is_exact}
    ranked = exact or whole or table
    best = max(ranked, key=lambda name: _mean(ranked[name]))
    yield _fastest(run, pair, best, ranked[best], table)
    if load := busy_load(run.machine):
        yield f"The machine was busy before the run ({load}), so others may have slowed any row."
    ahead = {name: speedups for name, speedups in table.items() if name != best}
    winners = {workload: _winner(run, workload, ranked[best].get(workload), ahead) for workload in workloads}
    if beaten := [f"on {workload} ({words})" for workload, words in winners.items() if words]:
        yield f"Others were faster than {best} {_listed(beaten)}."
    slower = {
        name: below
        for name, speedups in table.items()
        if (below := {workload: one for workload, one in speedups.items() if one.median < 1})
    }
    if not slower:
        yield f"No method was slower than {run.baseline} anywhere."
        return
    listed = [f"{name} {_slower_workloads(below, len(workloads))}" for name, below in slower.items()]
    yield f"Slower than {run.baseline}: {'; '.join(listed)}."


def _fastest(run: Run, pair: str, name: str, speedups: Mapping[str, Spread], table: _Table) -> str:
    """Return the first sentence."""
    plain = f"plain decoding, {run.baseline}"
    are_exact = {run.facts_of(one).is_exact for one in table}
    among = f"{' exact one' if len(are_exact) > 1 else ''} of {len(table)} methods" if len(table) > 1 else ""
    inexact = "" if run.facts_of(name).is_exact else ", not exact,"
    if len(speedups) == 1:
        ((workload, speedup),) = speedups.items()
        scope, speed = f"on {workload}", speedup.median
        detail = f"its repeats from {_times(speedup.least)} to {_times(speedup.most)}"
    else:
        (low, least), (high, most) = _ends(speedups)
        scope, speed = f"over {len(speedups)} workloads", _mean(speedups)
        detail = f"geometric mean, from {_times(least)} on {low} to {_times(most)} on {high}"
    if speed < 1:
        came_to = f"{name}{inexact} came to {_times(speed)} ({detail})"
        return f"With {pair}, nothing was faster than {plain}, {scope}: {came_to}."
    verb = "was the fastest" if among else "ran"
    return f"With {pair}, {name}{inexact} {verb}{among} {scope}: {_times(speed)} the speed of {plain} ({detail})."


def _winner(run: Run, workload: str, spread: Spread | None, others: _Table) -> str:
    """Return the methods that were faster than ``spread`` there, in words; empty if none was."""
    faster = [
        (one[workload], name)
        for name, one in others.items()
        if workload in one and (spread is None or one[workload].median > spread.median)
    ]
    if not faster:
        return ""
    speedup, name = max(faster, key=lambda one: one[0].median)
    winner = f"{name} {_times(speedup.median)}{'' if run.facts_of(name).is_exact else ', not exact'}"
    if spread is None:
        return winner
    scatter = ", within the scatter of the repeats" if speedup.least <= spread.most else ""
    return f"{winner}, it {_times(spread.median)}{scatter}"


def _slower_workloads(below: Mapping[str, Spread], num_workloads: int) -> str:
    """Return on which workloads a row was slower, and how slow it was."""
    (_, least), (_, most) = _ends(below)
    speed = _times(least) if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {_times(most)}"
    place = "everywhere" if len(below) == num_workloads > 1 else f"on {_listed(list(below))}"
    scatter = ", within the scatter of the repeats" if all(one.most >= 1 for one in below.values()) else ""
    return f"{place} ({speed}{scatter})"


def _ends(speedups: Mapping[str, Spread]) -> tuple[tuple[str, float], tuple[str, float]]:
    ordered = sorted(((workload, one.median) for workload, one in speedups.items()), key=lambda one: one[1])
    return ordered[0], ordered[-1]


def _mean(speedups: Mapping[str, Spread]) -> float:
    return statistics.geometric_mean(max(one.median, 1e-9) for one in speedups.values())


def _times(speed: float) -> str:
    return f"{speed:.2f}×"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
