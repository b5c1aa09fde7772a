"""`card profile` and `card record` measure; `card plan` predicts from their files without a model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from card.cli.parts.chosen_models import resolve_models
from card.cli.parts.options import given, pop_sampling_params
from card.cli.parts.starting import spinner
from card.cli.parts.tables import show, table
from card.errors import PlanError
from card.machine.expert_cost import ExpertCounts
from card.models.loading import load_tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets
from card.tools.planner.edge.command import plan_edge, print_edge
from card.tools.planner.measuring import measure_profile
from card.tools.planner.method_plans import MethodPlan, PlanReport, make_plan
from card.tools.planner.pool import PoolStudy, make_pool_study
from card.tools.planner.profile import Profile, load_profile, save_profile
from card.tools.planner.recorder import RecordRequest
from card.tools.planner.recorder import record as record_pair
from card.tools.planner.recording import Recording, load_recording, save_recording
from card.tools.planner.requests import PoolRequest
from card.tools.planner.scenario import Scenario
from card.tools.planner.synthetic import make_synthetic

_SHOWN_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # rows of a profile's table
_SHOWN_SIZES = (1, 4, 16, 64, 256, 1024)


def profile(out: Path, model: str, threads: tuple[int, ...] | None, wide: bool, **options: Any) -> None:
    """Run `card profile`: measure the cost of a model's passes on this machine."""
    with spinner(f"loading {model}") as say:
        measured = measure_profile(model, threads=threads or (), tell=say, **options)
    save_profile(measured, out)
    show(Console(), _profile_table(measured), is_wide=wide)
    if (counts := measured.setups[0].cost.experts) is not None:
        click.echo(_experts_line(counts))
    click.echo(f"written to {out}")


def record(
    out: Path,
    target: str | None,
    draft: str | None,
    data: tuple[str, ...],
    limit: int | None,
    raw: bool,
    methods: tuple[str, ...] | None,
    **options: Any,
) -> None:
    """Run `card record`: record the texts and likely tokens of a pair of models on some prompts."""
    params = pop_sampling_params(options).resolved()
    target_name, draft_name = resolve_models({"target": target, "draft": draft}, needs_draft=True)
    assert draft_name is not None
    datasets = read_datasets([parse_spec(one) for one in data], limit=limit, is_raw=raw)
    tokenizer = load_tokenizer(target_name)
    prompts = [tuple(question.encode(tokenizer)) for dataset in datasets for question in dataset.questions]
    options |= {"prompts": prompts, "params": params, "methods": methods or ()}
    request = RecordRequest(target=target_name, draft=draft_name, **options)
    with spinner(f"loading {target_name}") as say:
        recording = record_pair(request, say)
    save_recording(recording, out)
    click.echo(
        f"{len(recording.texts)} texts of {recording.num_tokens} tokens; the drafter's first choice is right at "
        f"{recording.agreement():.0%} of them; written to {out} ({out.stat().st_size / 1e6:.1f} MB)"
    )


def plan(
    target: str,
    draft: str | None,
    recording: Path | None,
    synthetic: float | None,
    methods: tuple[str, ...] | None,
    network_ms: float | None,
    delays_ms: tuple[float, ...],
    search: bool,
    pool: bool,
    edge: Path | None,
    edge_devices: int | None,
    edge_place: str | None,
    edge_bench: Path | None,
    as_json: bool,
    wide: bool,
    **options: Any,
) -> None:
    """Run `card plan`."""
    if edge is not None or edge_devices is not None:
        if pool:
            raise PlanError("give either --pool, or --edge and --edge-devices")
        with spinner("planning") as say:
            edges = plan_edge(
                target=target,
                draft=draft,
                file=edge,
                num_devices=edge_devices,
                place=edge_place,
                recording=recording,
                synthetic=synthetic,
                bench=edge_bench,
                network_ms=network_ms,
                say=say,
            )
        if as_json:
            click.echo(json.dumps(asdict(edges), ensure_ascii=False))
        else:
            print_edge(Console(), edges, is_wide=wide)
        return
    scenario = Scenario(
        target=load_profile(target),
        draft=load_profile(draft) if draft else None,
        recording=_recording(recording, synthetic),
        network_s=None if network_ms is None else network_ms / 1e3,
        **{name: options.pop(name) for name in ("cores", "draft_threads", "concurrency")},
    )
    with spinner("planning") as say:
        if pool:
            request = PoolRequest(delays_s=tuple(delay / 1e3 for delay in delays_ms), **given(options))
            study = make_pool_study(scenario, request, tell=say)
        else:
            report = make_plan(scenario, methods or (), searches=search, say=say)
    if as_json:
        click.echo(json.dumps(asdict(study if pool else report), ensure_ascii=False))
    elif pool:
        _print_pool(Console(), study, is_wide=wide)
    else:
        _print_plan(Console(), report, is_wide=wide)


def _recording(path: Path | None, agreement: float | None) -> Recording:
    if (path is None) == (agreement is None):
        raise PlanError("give either --recording, made by card record, or --synthetic with an agreement from 0 to 1")
    if path is not None:
        return load_recording(path)
    assert agreement is not None
    return make_synthetic(agreement)


# ---- output ----------------------------------------------------------------------------------------------------------


def _profile_table(measured: Profile) -> Table:
    costs = {setup.threads: setup.pass_cost() for setup in measured.setups}
    names = ["all" if count is None else f"{count} thread{'s' * (count > 1)}" for count in costs]
    shown = table("new tokens", numbers=names, title="milliseconds a pass")
    for size in _SHOWN_TOKENS:
        shown.add_row(str(size), *(f"{1e3 * cost.seconds(size):.2f}" for cost in costs.values()))
    shown.add_row("each further sequence", *(f"{1e3 * cost.per_sequence_s:.2f}" for cost in costs.values()))
    shown.add_row("1,000 rows of context", *(f"{1e6 * cost.per_context_row_s:.2f}" for cost in costs.values()))
    return shown


def _experts_line(counts: ExpertCounts) -> str:
    read = ", ".join(f"{num_read:,} by {num_rows}" for num_rows, num_read in counts.counted)
    return f"experts read, of {counts.num_experts:,} in all layers, by tokens of a pass: {read or 'not counted'}"


def _print_plan(console: Console, report: PlanReport, *, is_wide: bool) -> None:
    kind = "measured" if report.is_measured else "typed-in"
    pair = f"target {report.target}" + (f", draft {report.draft}" if report.draft else "")
    console.print(Text(f"{pair}; {kind} profiles"))
    if report.drafter is not None:
        console.print(Text(f"draft: {report.drafter.in_words}; {report.draft_row_bytes / 1e3:,.1f} kB a token of text"))
    network = "" if report.network_s is None else f", draft server {1e3 * report.network_s:g} ms away"
    cores = "" if report.cores is None else f", {report.cores} cores"
    console.print(
        Text(
            f"{report.num_texts} texts of {report.num_tokens} tokens ({report.recording}); first choice right at "
            f"{report.agreement:.0%}; {report.concurrency} at once{cores}{network}"
        )
    )
    console.print()
    show(console, _speed_table(report), is_wide=is_wide)
    console.print(Text("\nwhere the time goes, as shipped: shares of it", style="bold"))
    show(console, _time_table(report), spare=("waits", "overhead", "hits"), is_wide=is_wide)
    if any(plan.sensitivity for plan in report.methods):
        console.print(Text("\nwhat half and twice of a setting do to the speed", style="bold"))
        show(console, _knob_table(report), is_wide=is_wide)
    for name, reason in report.left_out.items():
        console.print(Text(f"{name}: {reason}"))


def _speed_table(report: PlanReport) -> Table:
    shown = table("method", numbers=("tokens/s", "speed-up", "best"))
    shown.add_column("with")
    for plan in report.methods:
        best = ", ".join(f"{name} {value}" for name, value in plan.best_settings.items())
        speeds = (f"{plan.tokens_per_s:.1f}", f"{plan.speed_up:.2f}x", f"{plan.best_speed_up:.2f}x")
        shown.add_row(plan.method, *speeds, best or "as shipped")
    return shown


def _time_table(report: PlanReport) -> Table:
    shown = table("method", "drafter", numbers=("tokens a pass", "hits", "target", "waits", "overhead", "drafter"))
    for plan in report.methods:
        shares, has_drafter = plan.shares, plan.where != "none"
        times = (shares["target"], shares["waiting"], shares["overhead"])
        shown.add_row(
            plan.method,
            _drafter(plan),
            f"{plan.tokens_per_pass:.2f}",
            f"{plan.hit_rate:.0%}" if has_drafter else "-",
            *(f"{share:.0%}" for share in times),
            f"{shares['drafter']:.0%}" if has_drafter else "-",
        )
    return shown


def _drafter(plan: MethodPlan) -> str:
    """Return where the drafter runs; of one that can be switched, the most frequent schedule at the end of texts."""
    if plan.where != "switch":
        return plan.where
    return max(plan.schedules, key=lambda name: plan.schedules[name])


def _knob_table(report: PlanReport) -> Table:
    shown = table("method", "setting", numbers=("value", "half", "twice"))
    for plan in report.methods:
        for one in plan.sensitivity:
            changes = ("-" if ratio is None else f"{100 * (ratio - 1):+.1f} %" for ratio in (one.halved, one.doubled))
            shown.add_row(plan.method, one.knob, str(one.value), *changes)
    return shown


def _print_pool(console: Console, study: PoolStudy, *, is_wide: bool) -> None:
    console.print(
        Text(f"{study.method} with one draft server; plain decoding: {study.plain_tokens_per_s:.1f} tokens/s")
    )
    console.print()
    sizes = [size for size in _SHOWN_SIZES if size <= study.max_targets]
    shown = table(numbers=("ms away", "load", "wanted", "served", *map(str, sizes)))
    for point in study.points:
        speeds = {run.num_targets: run.speed_up for run in point.runs}
        most = f"{point.most_targets}{'+' if point.most_targets >= study.max_targets else ''}"
        shown.add_row(
            f"{1e3 * point.delay_s:g}",
            f"{point.load:g}",
            f"{point.least_tokens_per_s / study.plain_tokens_per_s:.2f}x",
            most,
            *(f"{speeds[size]:.2f}x" for size in sizes),
        )
    show(console, shown, spare=[str(size) for size in sizes[1:]], is_wide=is_wide)
    console.print(Text("served: targets for which the mean speed-up is as wanted; right of it: speed-ups by targets"))
