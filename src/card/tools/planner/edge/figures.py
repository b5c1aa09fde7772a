"""Figures of how devices decode, and their sources: defaults, the scenario's file, options, lines of `card bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from card.engine.metrics import RequestStats
from card.errors import BenchError, PlanError
from card.tools.bench.records import RowFacts, Run
from card.tools.bench.results import load
from card.tools.bench.summary import complete_samples
from card.tools.planner.edge.scenario import Scenario

DECODING = ("acceptance", "hit_rate", "kept_share")  # fields of a scenario that a bench run can give
_HINT = "make it with card bench --methods sps,card-tree"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of how devices decode."""

    name: str
    value: float
    source: str


def figures_of(scenario: Scenario, sources: Mapping[str, str]) -> tuple[Figure, ...]:
    """Return the figures of a scenario; without a source they are defaults."""
    return tuple(Figure(name, getattr(scenario, name), sources.get(name, "default")) for name in DECODING)


def measured_figures(path: Path) -> dict[str, Figure]:
    """Return the figures from the last run of a bench file, without those that its rows cannot give.

    Acceptance is that of the chains of `sps`: candidates kept over candidates reached. The other figures are those of
    CARD beside the target with fixed settings. After a wrong first candidate, a drafter that starts again (a miss) has
    lost all layers ahead; else it keeps some, and makes as many fewer.

    Raises: PlanError if the file cannot be read, is of several pairs, or has no row of `sps`.
    """
    run = _last_run(path)
    chains = _joined(run, lambda row: row.method == "sps")
    if chains is None or not chains.stats.offered_per_depth:
        names = ", ".join(row.name for row in run.rows)
        raise PlanError(f"the last run of {path} has no row of sps, which tells acceptance, but {names}; {_HINT}")
    offered, accepted = chains.stats.offered_per_depth, chains.stats.accepted_per_depth
    reached = sum(map(min, offered, (offered[0], *accepted)))
    rate = sum(accepted) / reached
    figures = {"acceptance": Figure("acceptance", rate, f"{reached} candidates of {chains.rows} in {path}")}
    trees = _joined(run, _is_fixed_card)
    num_wrong = (1.0 - rate) * trees.num_tokens if trees else 0.0
    if trees is None or num_wrong < 1.0:
        return figures
    source = f"about {num_wrong:.0f} wrong first candidates of {trees.rows} in {path}"
    hit_rate = max(0.0, 1.0 - trees.stats.misses / num_wrong)
    figures["hit_rate"] = Figure("hit_rate", hit_rate, source)
    if trees.stats.rolled_back_tokens and hit_rate:
        spare = trees.stats.drafter_passes - (trees.num_tokens - trees.stats.misses)  # a missed token was in no layer
        share = (1.0 - spare / trees.stats.rolled_back_tokens) / hit_rate
        figures["kept_share"] = Figure("kept_share", min(1.0, max(0.0, share)), source)
    return figures


@dataclass(frozen=True, slots=True)
class _Joined:
    """Counters of some rows, summed over all texts."""

    rows: str
    num_tokens: int  # of decoding
    stats: RequestStats


def _last_run(path: Path) -> Run:
    try:
        runs = load(path)
    except BenchError as error:
        raise PlanError(str(error)) from error
    if not runs:
        raise PlanError(f"{path} holds no run of card bench; {_HINT}")
    if len(runs[-1].pairs) > 1:
        names = ", ".join(pair.name for pair in runs[-1].pairs)
        raise PlanError(
            f"the last run of {path} has several pairs, {names}; a plan has one: run card bench for it alone"
        )
    return runs[-1]


def _joined(run: Run, is_meant: Callable[[RowFacts], bool]) -> _Joined | None:
    """Return the counters of all rows that ``is_meant`` selects, without a judge's; None if none has any."""
    names = {row.name for row in run.rows if is_meant(row) and "/" not in row.name}
    samples = [(one, one.stats) for one in complete_samples(run) if one.row in names and one.stats is not None]
    if not samples:
        return None
    used = sorted({sample.row for sample, _ in samples})
    tokens = sum(sample.decode_tokens for sample, _ in samples)
    return _Joined(", ".join(used), tokens, RequestStats.joined(stats for _, stats in samples))


def _is_fixed_card(row: RowFacts) -> bool:
    """Return whether a row is CARD beside its target throughout: a tuned one may switch to turns, or rest."""
    wanted = {"drafter": "beside", "policy": "fixed"}
    return row.method == "card" and wanted.items() <= row.settings.items()
