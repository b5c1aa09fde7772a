"""`card plan`: how fast every method would be, from profiles and a recording; no model is run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from card.cli.options import given
from card.cli.plan_tables import print_plan, print_pool
from card.cli.progress import spinner
from card.errors import PlanError
from card.planner.plan import make_plan
from card.planner.pool import make_pool_study
from card.planner.profile import load_profile
from card.planner.recording import Recording, load_recording
from card.planner.requests import PoolRequest
from card.planner.scene import Scene
from card.planner.synthetic import make_synthetic


def run(
    target: str,
    draft: str | None,
    recording: Path | None,
    synthetic: float | None,
    methods: tuple[str, ...] | None,
    network_ms: float | None,
    delays_ms: tuple[float, ...],
    search: bool,
    pool: bool,
    as_json: bool,
    wide: bool,
    **options: Any,
) -> None:
    """Do what `card plan` was asked for."""
    scene = Scene(
        target=load_profile(target),
        draft=load_profile(draft) if draft else None,
        recording=_recording(recording, synthetic),
        network_s=None if network_ms is None else network_ms / 1e3,
        **{name: options.pop(name) for name in ("cores", "draft_threads", "concurrency")},
    )
    with spinner("planning") as say:
        if pool:
            request = PoolRequest(delays_s=tuple(delay / 1e3 for delay in delays_ms), **given(options))
            study = make_pool_study(scene, request, tell=say)
        else:
            report = make_plan(scene, methods or (), searches=search, tell=say)
    if as_json:
        click.echo(json.dumps(asdict(study if pool else report), ensure_ascii=False))
    elif pool:
        print_pool(Console(), study, is_wide=wide)
    else:
        print_plan(Console(), report, is_wide=wide)


def _recording(path: Path | None, agreement: float | None) -> Recording:
    if (path is None) == (agreement is None):
        raise PlanError("give either --recording, made by card record, or --synthetic with an agreement from 0 to 1")
    if path is not None:
        return load_recording(path)
    assert agreement is not None
    return make_synthetic(agreement)
