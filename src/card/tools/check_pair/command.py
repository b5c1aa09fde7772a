"""`card check-pair`: whether a draft model makes a target faster on this machine, and if not, why."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from card.api.host import Host
from card.api.llm import LLM
from card.assembly.drafters import as_it_drafts, load_state_draft
from card.assembly.plan import readable
from card.cli.parts.chosen_models import resolve_models
from card.cli.parts.files import read_prompts
from card.cli.parts.options import DEMO_TARGET, given
from card.cli.parts.remarks import hint_at_int8
from card.cli.parts.starting import spinner
from card.cli.parts.tables import show, table
from card.config import KERNELS_VARIABLE, DraftSettings, EngineSettings, Schedule, parse_parameter_count
from card.config.fields import declared
from card.config.method import ALONE
from card.engine.policy.rounds import ScheduleCost
from card.engine.policy.tuned import TunedPolicy
from card.errors import SettingsError, VocabularyError, named
from card.models.block_loading import is_state_drafter
from card.models.demo import SAMPLE_PROBLEMS
from card.models.drafter_facts import drafter_of
from card.models.facts import context_limit
from card.models.inflation import inflate
from card.models.loaded_model import LoadedModel
from card.models.loading import check_pair as check_tokenizers
from card.models.loading import load_decoder, load_tokenizer
from card.models.names import OWN_BLOCK
from card.models.runners import how_it_runs, plain_runner
from card.tools.check_pair.facts import (
    Latency,
    MeasuredAgreement,
    ModelMemory,
    PairReport,
    Speeds,
    latencies,
    memory_of,
    verdict,
)
from card.tools.check_pair.measuring import TIMED_RUNS, TimeLimit, measure_agreement, measure_speeds

MOST_MEASURING_S = 60.0  # since the target was loaded; starting the engines is not cut short
_AGREEMENT_SHARE = 0.25  # of the time that is left when agreement is measured; the rest is for speed
_NUM_SAMPLE_PROMPTS = 4
CARRIED = (  # options that the suggested command repeats
    *("target_cost", "dtype", "device", "draft_device", "max_model_len", "threads", "draft_threads"),
    *("cores", "draft_cores"),
)
_SHORT: dict[Schedule, str] = {
    "beside": "beside the target",
    "turns": "in turns",
    "off": "the drafter rested at the end",
}
_SCHEDULES: dict[Schedule, str] = {"beside": "drafter beside the target", "turns": "turns", "off": "plain decoding"}


def run(prompts: Path | None, max_tokens: int, as_json: bool, wide: bool, **options: Any) -> int:
    """Run `card check-pair`."""
    target, draft = resolve_models(options, needs_draft=True)
    assert draft is not None
    sample = SAMPLE_PROBLEMS[:_NUM_SAMPLE_PROMPTS] if prompts is None else read_prompts(prompts)
    with spinner("loading the models", in_pipes=True) as say:
        report = examine(target, draft, sample, max_tokens, dict(options), say)
    report = replace(report, command=next_command(target, draft if report.is_worth_it else None, options))
    if as_json:
        click.echo(json.dumps(asdict(report), ensure_ascii=False))
    else:
        print_report(Console(), report, is_wide=wide)
    return 0 if report.is_worth_it else 1


def next_command(target: str, draft: str | None, options: Mapping[str, Any]) -> str:
    """Return the command line for a chat with the target as measured, without a draft model if ``draft`` is None."""
    words = ["card", "chat", "--target", target, *(() if draft is None else ("--draft", draft))]
    if draft is None and target == DEMO_TARGET:  # it has a draft model unless told otherwise
        words += ["--method", ALONE]
    usual = {name: declared(EngineSettings)[name].default for name in CARRIED}
    carried = {name: options[name] for name in CARRIED if draft is not None or not name.startswith("draft")}
    for name, value in {**carried, "kernels": os.environ.get(KERNELS_VARIABLE)}.items():
        if value is not None and value != usual.get(name):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += ["--" + name.replace("_", "-"), shown]
    return shlex.join(words)


def examine(
    target: str,
    draft: str,
    prompts: tuple[str, ...],
    max_tokens: int,
    options: dict[str, Any],
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> PairReport:
    """Measure as much as time allows; stop early if the tokenizers differ.

    Args:
        options: of the command, from which settings are made.
        tell: called with a line about each step.
        clock: seconds; rises steadily.
    Raises: CardError of any kind.
    """
    tokenizer = load_tokenizer(target)
    block = target if draft == OWN_BLOCK else draft if is_state_drafter(draft, cache_dir=None) else None
    if block is not None and options["target_cost"] is not None:
        raise SettingsError(f"{named('target_cost')} does not go with a block or a head: leave one of the two out")
    try:
        if block is None:
            check_tokenizers(tokenizer, target, draft)
    except VocabularyError as error:
        return PairReport(target, draft, False, f"tokenizers differ: {error}")
    cost = options.pop("target_cost")
    model = load_decoder(target, dtype=options["dtype"], device=options["device"])
    if cost is not None:
        model = inflate(model, parse_parameter_count(cost))
    settings = given(options) | {"max_num_seqs": 1, "wait_for_drafter": True, "cache": False}

    limit = TimeLimit.of(MOST_MEASURING_S, clock)
    tell("bringing up the draft model, in turns with the target")
    drafts_for = model if block is None else target  # a block or head lies in files
    with LLM(drafts_for, draft, tokenizer=tokenizer, method="sps", **settings) as sps:
        tell("comparing what the two models write")
        agreement = measure_agreement(sps, prompts, max_tokens, limit.part(_AGREEMENT_SHARE))
    tell("measuring passes under each schedule, and bringing the drafter up")
    with (
        LLM(model, tokenizer=tokenizer, method="vanilla", **readable(settings, "vanilla")) as plain,
        LLM(drafts_for, draft, tokenizer=tokenizer, method="card", **settings) as tuned,
    ):
        policy = tuned.host.policy
        assert isinstance(policy, TunedPolicy)
        costs = policy.costs
        hint_at_int8(plain.host.could_run_int8)
        models = _described(model, plain.host, draft, block, tuned.max_model_len, costs, options)
        predicted = {schedule: policy.predicted(schedule, 1, agreement.share) for schedule in costs}
        speeds = measure_speeds(plain, tuned, prompts, max_tokens, limit, tell)
    is_worth_it, reason = verdict(costs, agreement.share, speeds.speed_up if speeds else None, DraftSettings())
    return PairReport(
        target,
        draft,
        is_worth_it,
        reason,
        target_cost=plain.target_cost,
        **models,
        latencies=latencies(costs),
        agreement=agreement,
        predicted_tokens_per_s=predicted,
        speeds=speeds,
        left_out=_left_out(agreement, speeds, len(prompts)),
    )


def _described(
    target: LoadedModel,
    host: Host,
    draft: str,
    block: str | None,
    max_model_len: int,
    costs: Mapping[Schedule, ScheduleCost],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of the report about how both models run, and the memory that they take."""
    dtype, device = options["dtype"], options["draft_device"] or options["device"]
    if block is not None:
        model = load_state_draft(block, target, host.runner, dtype=dtype)
    else:
        model = load_decoder(draft, dtype=dtype, device=device)
    model = as_it_drafts(model, target, host.tokenizer)
    runner = plain_runner(model, max_model_len=min(max_model_len, context_limit(model)))
    num_drafts = sum(cost.drafter is not None for cost in costs.values())
    return {
        "how_run": (how_it_runs(host.runner), how_it_runs(runner)),
        "memory": (memory_of(target, host.runner, 1), memory_of(model, runner, num_drafts)),
        "drafter": drafter_of(model, is_own=draft == OWN_BLOCK),
    }


def _left_out(agreement: MeasuredAgreement, speeds: Speeds | None, num_prompts: int) -> tuple[str, ...]:
    """Return the measurements that there was no time for."""
    limits = []
    if agreement.is_cut:
        seen = f"{agreement.num_prompts} of {num_prompts} prompts"
        limits.append(f"agreement is that of {agreement.num_tokens} tokens of {seen}")
    if speeds is None:
        limits.append("no speed was measured")
    elif speeds.is_cut:
        num_runs, seen = len(speeds.speed_up_of_runs), f"{speeds.num_prompts} of {num_prompts} prompts"
        limits.append(f"speed is that of {num_runs} of {TIMED_RUNS} pairs of runs and of {seen}, perhaps in part")
    return tuple(limits)


# ---- output ----------------------------------------------------------------------------------------------------------


def print_report(console: Console, report: PairReport, *, is_wide: bool) -> None:
    """Print what was found, as tables."""
    cost = f" at {report.target_cost}" if report.target_cost else ""
    console.print(Text(f"target {report.target}{cost}, draft {report.draft}"))
    if report.memory and report.latencies and report.agreement and report.predicted_tokens_per_s:
        console.print("tokenizers fit: each token id means the same to both models")
        for model, words in zip(("target", "draft"), report.how_run or (), strict=False):
            console.print(Text(f"{model}: {words}"))
        if report.drafter:
            console.print(Text(f"draft: {report.drafter.in_words}"))
        for title, one in (
            ("memory", _memory_table(*report.memory)),
            ("milliseconds a pass, by its tokens", _latency_table(report.latencies)),
            _agreement_table(report.agreement),
            ("tokens/s, one request at a time", _speed_table(report.predicted_tokens_per_s, report.speeds)),
        ):
            console.print(Text(f"\n{title}", style="bold"))
            sizes = [str(column.header) for column in one.columns[2:] if str(column.header).isdigit()]
            show(console, one, spare=sizes, is_wide=is_wide)
        if report.speeds:
            console.print(Text(_speed_note(report.speeds)))
        if report.left_out:
            left_out = "; ".join(report.left_out)
            console.print(Text(f"Measuring took all of its {MOST_MEASURING_S:g} s and was cut short: {left_out}."))
        console.print()
    answer = Text("yes: " if report.is_worth_it else "no: ", style="bold green" if report.is_worth_it else "bold red")
    console.print(answer.append(report.reason, style="default"))
    if report.speeds:
        console.print(Text(_origin_note(report.speeds)))
    console.print(Text(f"run it: {report.command}"), soft_wrap=True)


def _memory_table(target: ModelMemory, draft: ModelMemory) -> Table:
    shown = table("", numbers=("target", "draft"))
    rows: dict[str, Callable[[ModelMemory], str]] = {
        "parameters": lambda memory: f"{memory.num_parameters / 1e6:,.1f}M",
        "weights": lambda memory: _megabytes(memory.weight_bytes),
        "weights again, packed for the CPU": lambda memory: _megabytes(memory.packed_bytes),
        "KV of one token": lambda memory: f"{memory.kv_bytes_per_token / 1e3:,.1f} kB",
        f"KV of a request of {target.max_model_len} tokens": lambda memory: _megabytes(memory.kv_bytes_per_request),
        "copies held": lambda memory: f"{memory.num_copies}",
        "in all, for one request": lambda memory: _megabytes(memory.total_bytes),
    }
    for name, read in rows.items():
        shown.add_row(name, read(target), read(draft))
    return shown


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _latency_table(measured: tuple[Latency, ...]) -> Table:
    shown = table("", numbers=map(str, measured[0].pass_ms))
    where: dict[Schedule, str] = {"beside": "beside each other", "turns": "in turns", "off": "alone"}
    for one in measured:
        threads = f", {one.threads} thread{'s' * (one.threads > 1)}" if one.threads is not None else ""
        name = f"{one.model} {where[one.schedule]}{threads}"
        shown.add_row(name, *(f"{ms:.2f}" for ms in one.pass_ms.values()))
    return shown


def _agreement_table(agreement: MeasuredAgreement) -> tuple[str, Table]:
    share, length = f"{agreement.share:.0%}", f"{agreement.tokens_per_pass:.2f}"
    shown = table("drafted token", numbers=map(str, range(1, len(agreement.taken_by_depth) + 1)))
    shown.add_row("taken", *(f"{share:.0%}" for share in agreement.taken_by_depth))
    return f"agreement: {share} of the drafted tokens that could follow were taken; {length} tokens a pass", shown


def _speed_table(predicted: dict[Schedule, float], speeds: Speeds | None) -> Table:
    shown = table("", numbers=("predicted", "measured"))
    plain, card, speed_up = "", "", ""
    if speeds is not None:
        plain, card = f"{speeds.plain_tokens_per_s:.1f}", f"{speeds.card_tokens_per_s:.1f}"
        speed_up = f"{speeds.speed_up:.2f}x"
    for schedule, rate in predicted.items():
        shown.add_row(_SCHEDULES[schedule], f"{rate:.1f}", plain if schedule == "off" else "")
    shown.add_row("card", f"{max(predicted.values()):.1f}", card)
    shown.add_row("speed-up", f"{max(predicted.values()) / predicted['off']:.2f}x", speed_up)
    return shown


def _speed_note(speeds: Speeds) -> str:
    runs = speeds.speed_up_of_runs
    chosen = "to rest the drafter" if speeds.schedule == "off" else _SCHEDULES[speeds.schedule]
    spread = f"{min(runs):.2f}x to {max(runs):.2f}x" if len(runs) > 1 else f"{runs[0]:.2f}x"
    note = f"card chose: {chosen}. Speed-up in {_runs(len(runs))}: {spread}."
    if speeds.is_same_text:
        return f"{note} The texts are the same."
    return f"{note} The texts differ: in 16-bit arithmetic two tokens may tie."


def _origin_note(speeds: Speeds) -> str:
    """Return what `card` verified in the timed runs: a chain or a tree, and who wrote what was accepted."""
    drafted = f"the draft model wrote {speeds.shape_in_words or 'nothing'}"
    return f"{_SHORT[speeds.schedule]}: {drafted}; {speeds.accepted_in_words}"


def _runs(count: int) -> str:
    return f"{count} alternating runs" if count > 1 else "one run of each"
