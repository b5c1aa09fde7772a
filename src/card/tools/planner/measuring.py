"""Measure a profile: passes as the engine measures them at start, and the overheads around them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

from card.assembly.drafters import as_it_drafts, load_state_draft
from card.assembly.latency.timing import measure_pass_cost
from card.config import parse_parameter_count
from card.config.engine import MAX_THREADS
from card.errors import PlanError, named
from card.machine.threads import CoreSet, default_threads, pinned
from card.models.block_loading import is_state_drafter, require_block
from card.models.by_transformers import torch_module
from card.models.drafter_facts import drafter_of
from card.models.facts import context_limit, parameter_count
from card.models.inflation import inflate
from card.models.loaded_model import LoadedModel
from card.models.loading import load_decoder, load_tokenizer
from card.models.names import OWN_BLOCK
from card.models.own.eagle_head import EagleHead
from card.models.runners import make_runner
from card.text.fit import tokenizer_fingerprint
from card.text.tokenizer import Tokenizer
from card.tools.bench.environment import describe_run
from card.tools.planner.overheads import measure_overheads
from card.tools.planner.profile import PassTable, Profile, Setup

_MAX_MODEL_LEN = 2048
_TREE_ROWS = 1024
MEASURING_LIMIT_S = 10.0  # for the passes with one number of threads; no request waits meanwhile


def measure_profile(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    draft: str | None = None,
    target_cost: str | None = None,
    threads: tuple[int, ...] = (),
    ctc: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Load a model and measure it.

    Args:
        draft: measure what drafts for it from its states instead: `mtp`, the file of a block, or a head.
        target_cost: inflate it to the price of a model of this size.
        threads: numbers of CPU threads to measure, rising; empty: the usual number and one fewer, as beside a drafter.
        ctc: file of a head that drafts for the model; it is timed, too.
        tell: called with a line about each step.
    Raises: ModelError if it cannot be loaded, or the head is of another model; PlanError unless threads are
        rising numbers of threads that we may have, or for a ``draft`` that is measured otherwise.
    """
    if list(threads) != sorted(set(threads)) or not set(threads) <= set(range(1, MAX_THREADS + 1)):
        raise PlanError(f"{named('threads')} must be from 1 to {MAX_THREADS}, in rising order, got {list(threads)}")
    environment = describe_run()  # figures of a busy machine are unreliable
    tell(f"loading {name}")
    tokenizer = load_tokenizer(name)
    model = load_decoder(name, dtype=dtype, device=device)
    if draft is not None:
        model = state_draft_of(name, draft, model, tokenizer, dtype=dtype)
    own_parameters = parameter_count(model)
    if target_cost is not None:
        model = inflate(model, parse_parameter_count(target_cost))
    max_model_len = min(_MAX_MODEL_LEN, context_limit(model))
    runner = make_runner(model, max_model_len=max_model_len, max_tree_rows=_TREE_ROWS)
    is_cpu = str(runner.device) == "cpu"
    setups = []
    for count in threads or _usual_threads(is_cpu):
        with pinned(CoreSet((), count if is_cpu else None, runner.is_exact)):
            tell(f"measuring passes{f' with {count} threads' if is_cpu else ''}")
            runner.warm_up(16)
            cost = measure_pass_cost(runner, clock=time.perf_counter, time_limit_s=MEASURING_LIMIT_S)
            setups.append(Setup(threads=count if is_cpu else None, cost=PassTable.of(cost)))
    tell("measuring the overheads")
    with pinned(CoreSet((), min(threads, default=1) if is_cpu else None, runner.is_exact)):
        overheads = measure_overheads(runner, tokenizer, ctc=ctc)
    cost_of = f"{parameter_count(model) / 1e6:.0f}M (inflated)" if target_cost else ""
    return Profile(
        name=name if draft is None else f"{draft} of {name}",
        measured=True,
        source=environment.command,
        machine=f"{environment.machine['cpu']} {platform.node()}",
        device=str(runner.device) if is_cpu else _device_name(str(runner.device)),
        dtype=runner.precision,
        num_parameters=own_parameters,
        kv_row_bytes=runner.row_bytes,
        cost_of=cost_of,
        tokenizer=tokenizer_fingerprint(tokenizer),
        date=environment.date,
        versions=environment.versions,
        load_average=environment.machine["load_average"],
        setups=tuple(setups),
        overheads=overheads,
        drafter=drafter_of(model, is_own=draft == OWN_BLOCK),
    )


def state_draft_of(target_name: str, draft: str, target: LoadedModel, tokenizer: Tokenizer, *, dtype: str) -> Any:
    """Return a block or a head as it drafts for a loaded target.

    Raises: ModelError as of `load_state_draft`; PlanError for another draft model, or one of several tokens a pass.
    """
    if draft == OWN_BLOCK:
        require_block(target_name, cache_dir=None)
    elif not is_state_drafter(draft, cache_dir=None):
        raise PlanError(f"{draft} drafts from text alone: make its profile by its own name, card profile {draft}")
    runner = make_runner(target, max_model_len=min(_MAX_MODEL_LEN, context_limit(target)))
    name = target_name if draft == OWN_BLOCK else draft
    made = load_state_draft(name, target, runner, dtype=dtype)
    if isinstance(made, EagleHead) and made.inputs.num_tokens > 1:
        raise PlanError(f"{draft} drafts several tokens in a pass, which a plan cannot follow: leave it out")
    return as_it_drafts(made, target, tokenizer)


def _device_name(device: str) -> str:
    name: str = torch_module("transformers.devices", f"device {device}").device_name(device)
    return name


def _usual_threads(is_cpu: bool) -> tuple[int, ...]:
    """Return the default number of threads, preceded by one fewer: a drafter in a process takes one."""
    most = default_threads()
    return (most - 1, most) if is_cpu and most > 1 else (most,)
