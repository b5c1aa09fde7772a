"""`card plan --edge`: compare ways to assign devices with drafters to servers with targets, and to share these."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from card.cli.parts.starting import Say
from card.cli.parts.tables import show, table
from card.errors import PlanError
from card.labs.edge.figures import Figure, measured_figures
from card.labs.edge.scenario import check_scenario, draw_scenario, load_scenario
from card.labs.edge.study import EdgeStudy, make_edge_study
from card.machine.packages import install_command
from card.tools.planner.profile import load_profile
from card.tools.planner.recording import load_recording

_NUM_DRAWN = 5  # scenarios of --edge-devices
_WORDS = {
    "acceptance": "first candidates that are right",
    "hit_rate": "of the others, tokens that the tree has",
    "kept_share": "of the layers ahead, those that such a token keeps",
    "wrong_passes": "passes that a wrong first candidate costs CARD",
}
_SPARE = ("mJ a token", "tokens a pass", "+-")


def plan_edge(
    *,
    target: str,
    draft: str | None,
    file: Path | None,
    num_devices: int | None,
    place: str | None,
    recording: Path | None,
    synthetic: float | None,
    bench: Path | None,
    network_ms: float | None,
    say: Say,
) -> EdgeStudy:
    """Return the study. Raises: PlanError for options that contradict each other, or a broken file."""
    if file is not None and num_devices is not None:
        raise PlanError("give either --edge, a file, or --edge-devices, a number to draw")
    if draft is None:
        raise PlanError("a plan for the edge needs the profile of the devices' draft model: give --draft")
    if file is not None:
        if place is not None:
            raise PlanError("--edge-place goes with --edge-devices, a number to draw; a file of --edge is a place")
        scenarios = [load_scenario(file)]
    else:
        drawn = num_devices or 0
        scenarios = [draw_scenario(drawn, seed=seed, place=place or "even") for seed in range(_NUM_DRAWN)]
    figures = _figures(recording, synthetic, bench)
    changes = {one.name: one.value for one in figures}
    changes |= {} if network_ms is None else {"one_way_s": network_ms / 1e3}
    changed = [msgspec.structs.replace(scenario, **changes) for scenario in scenarios]
    for scenario in changed:
        check_scenario(scenario)
    sources = dict.fromkeys(msgspec.json.decode(file.read_bytes()), str(file)) if file else {}
    sources |= {one.name: one.source for one in figures}
    return make_edge_study(changed, load_profile(target), load_profile(draft), say, sources=sources)


def _figures(recording: Path | None, synthetic: float | None, bench: Path | None) -> list[Figure]:
    """Return the figures of decoding from the options. Raises: PlanError if two give the same, or a file is broken."""
    if sum(one is not None for one in (recording, synthetic, bench)) > 1:
        raise PlanError(
            "give one of --recording, made by card record, --synthetic and --edge-bench: all tell acceptance"
        )
    if bench is not None:
        return list(measured_figures(bench).values())
    if recording is not None:
        return [Figure("acceptance", load_recording(recording).agreement(), str(recording))]
    return [] if synthetic is None else [Figure("acceptance", synthetic, "--synthetic")]


def print_edge(console: Console, study: EdgeStudy, *, is_wide: bool) -> None:
    """Print which overlaps bring no gain, then all rows."""
    console.print(
        Text(
            f"target {study.target} on {study.num_servers} servers, draft {study.draft} on {study.num_devices} devices"
            + (f"; means of {study.num_scenarios} drawn places" if study.num_scenarios > 1 else "")
        )
    )
    slower = dict.fromkeys(
        f"{row.overlap} by {row.association}" for row in study.rows if row.seconds_per_token > study.plain_seconds
    )
    console.print(
        Text(
            f"the servers alone, without drafters: {1e3 * study.plain_seconds:.1f} ms a token; "
            f"no gain over that: {', '.join(slower) or 'none'}"
        )
    )
    for figure in study.figures:
        console.print(Text(f"{_WORDS[figure.name]}: {figure.value:.2f} ({figure.source})"), soft_wrap=True)
    if not study.has_convex:
        console.print(Text(f"convex shares are left out: they need scipy; run {install_command('edge')}"))
    console.print()
    show(console, _rows(study), spare=_SPARE, is_wide=is_wide)
    console.print(Text("saved: of the mean latency of the other associations with equal shares"))


def _rows(study: EdgeStudy) -> Table:
    shown = table(
        "overlap", "servers by", "shares", numbers=("ms a token", "+-", "mJ a token", "tokens a pass", "saved")
    )
    for row in study.rows:
        shown.add_row(
            row.overlap,
            row.association,
            row.shares,
            f"{1e3 * row.seconds_per_token:.1f}",
            f"{1e3 * row.seconds_range:.1f}" if study.num_scenarios > 1 else "-",
            f"{1e3 * row.joules_per_token:.0f}",
            f"{row.tokens_per_pass:.2f}",
            f"{100 * study.saved(row):+.1f} %",
        )
    return shown
