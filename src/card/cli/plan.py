"""`card plan`: how fast every method would be, from profiles and a recording; no model is run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from card.cli.options import parse_names
from card.cli.plan_tables import print_plan, print_pool
from card.errors import PlanError
from card.planner.plan import make_plan
from card.planner.pool_study import PoolRequest, make_pool_study
from card.planner.profile import load_profile
from card.planner.recording import Recording, load_recording
from card.planner.scene import Scene
from card.planner.synthetic import make_synthetic


def _parse_numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    """Return numbers from "0,5,20"; raises click's BadParameter."""
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"must be numbers such as 0 or 0,5,20, got {value!r}") from None


@click.command(short_help="Predict the speed of every method from profiles and a recording.")
@click.option("--target", required=True, help="Profile of the target: a file of card profile, or a shipped one.")
@click.option("--draft", help="Profile of the draft model.")
@click.option(
    "--recording", type=click.Path(dir_okay=False, path_type=Path), help="What the pair does: a file of card record."
)
@click.option(
    "--synthetic",
    type=float,
    help="Instead of a recording: the share of places at which the drafter's first choice is right, from 0 to 1.",
)
@click.option("--methods", callback=parse_names, help="Which methods, such as vanilla,sps,card.  [default: all]")
@click.option("--cores", type=int, help="CPU threads of target and drafter together.  [default: as profiled]")
@click.option("--draft-threads", type=int, default=1, show_default=True, help="Of a drafter in a process of its own.")
@click.option("--network-ms", type=float, help="Put the drafter on a draft server so many milliseconds away, one way.")
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests at once.")
@click.option("--search/--no-search", default=True, show_default=True, help="Look for the best settings.")
@click.option("--pool", is_flag=True, help="Ask instead how many targets one draft server can serve.")
@click.option("--method", default="card", show_default=True, help="Pool: the method of all targets.")
@click.option(
    "--delays-ms", default="0,5,20", show_default=True, callback=_parse_numbers, help="Pool: delays of the network."
)
@click.option(
    "--loads",
    default="0.3,0.7,1",
    show_default=True,
    callback=_parse_numbers,
    help="Pool: share of time that a target is busy with a drafter of its own; 1: always.",
)
@click.option("--min-speed-up", type=float, help="Pool: over plain decoding.  [default: 90 % of one target's]")
@click.option("--max-targets", type=int, default=4096, show_default=True, help="Pool: no more are tried.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables.")
def plan(
    target: str,
    draft: str | None,
    recording: Path | None,
    synthetic: float | None,
    methods: tuple[str, ...] | None,
    cores: int | None,
    draft_threads: int,
    network_ms: float | None,
    concurrency: int,
    search: bool,
    pool: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict speeds, settings and where time goes: the engine runs in virtual time on what was recorded."""
    scene = Scene(
        target=load_profile(target),
        draft=load_profile(draft) if draft else None,
        recording=_recording(recording, synthetic),
        cores=cores,
        draft_threads=draft_threads,
        network_s=None if network_ms is None else network_ms / 1e3,
        concurrency=concurrency,
    )
    with Console(stderr=True).status("") as status:
        if pool:
            request = PoolRequest(
                method=options["method"],
                delays_s=tuple(delay / 1e3 for delay in options["delays_ms"]),
                loads=options["loads"],
                min_speed_up=options["min_speed_up"],
                max_targets=options["max_targets"],
            )
            study = make_pool_study(scene, request, tell=status.update)
        else:
            report = make_plan(scene, methods or (), searches=search, tell=status.update)
    if as_json:
        click.echo(json.dumps(asdict(study if pool else report), ensure_ascii=False))
    elif pool:
        print_pool(Console(), study)
    else:
        print_plan(Console(), report)


def _recording(path: Path | None, agreement: float | None) -> Recording:
    if (path is None) == (agreement is None):
        raise PlanError("give either --recording, made by card record, or --synthetic with an agreement from 0 to 1")
    if path is not None:
        return load_recording(path)
    assert agreement is not None
    return make_synthetic(agreement)
