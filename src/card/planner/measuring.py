"""Measure a profile: passes over a grid of sizes, and what `card.planner.around` finds around them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from os import getloadavg
from statistics import median

import torch

from card.config import INT8
from card.engine.latency import measure_pass_cost
from card.errors import PlanError
from card.models.cuda.bucketed import make_runner
from card.models.inflation import inflate, parse_parameter_count
from card.models.loading import context_limit, load_model, load_tokenizer, parameter_count
from card.models.protocol import Extension, LanguageModel
from card.models.text import tokenizer_fingerprint
from card.models.threads import CoreSet, pinned
from card.planner.around import measure_overheads
from card.planner.files import made_now
from card.planner.profile import PassGrid, PassTable, Profile, Setup
from card.planner.requests import ProfileRequest

_MAX_MODEL_LEN = 2048
_TREE_ROWS = 1024


def measure_profile(request: ProfileRequest, tell: Callable[[str], None] = lambda _: None) -> Profile:
    """Load the model and measure it.

    Args:
        tell: is told what is being done.
    Raises: ModelError if it cannot be loaded; PlanError if the grid does not fit into the model's context.
    """
    load_average = getloadavg()[0]
    tell(f"loading {request.model}")
    model = load_model(request.model, dtype=request.dtype, device=request.device)
    own_parameters = parameter_count(model)
    if request.target_cost is not None:
        model = inflate(model, parse_parameter_count(request.target_cost))
    max_model_len = min(_MAX_MODEL_LEN, context_limit(model))
    most_rows = request.contexts[-1] + request.tokens[-1]
    if most_rows > max_model_len:
        raise PlanError(
            f"{request.contexts[-1]} rows of context and {request.tokens[-1]} tokens are more than the "
            f"{max_model_len} positions of {request.model}; ask for fewer with --contexts or --tokens"
        )
    runner = make_runner(model, max_model_len=max_model_len, max_tree_rows=_TREE_ROWS)
    is_cpu = runner.device.type == "cpu"
    setups = []
    for threads in request.threads or (torch.get_num_threads(),):
        with pinned(CoreSet((), threads if is_cpu else None, runner.precision == INT8)):
            tell(f"measuring passes{f' with {threads} threads' if is_cpu else ''}")
            runner.warm_up(16)
            cost = measure_pass_cost(runner, clock=time.perf_counter)
            grid = measure_grid(runner, request)
            setups.append(Setup(threads=threads if is_cpu else None, cost=PassTable.of(cost), grid=grid))
    tell("measuring what goes on around the passes")
    with pinned(CoreSet((), min(request.threads, default=1) if is_cpu else None, runner.precision == INT8)):
        tokenizer = load_tokenizer(request.model)
        overheads = measure_overheads(runner, tokenizer)
    cost_of = f"{parameter_count(model) / 1e6:.0f}M (inflated)" if request.target_cost else ""
    return Profile(
        name=request.model,
        measured=True,
        source=request.command or "card profile",
        machine=f"{platform.processor() or platform.machine()} {platform.node()}",
        device=str(runner.device) if is_cpu else torch.cuda.get_device_name(runner.device),
        dtype=runner.precision,
        num_parameters=own_parameters,
        cost_of=cost_of,
        tokenizer=tokenizer_fingerprint(tokenizer),
        **made_now(),
        load_average=round(load_average, 2),
        setups=tuple(setups),
        overheads=overheads,
    )


def measure_grid(
    model: LanguageModel, request: ProfileRequest, clock: Callable[[], float] = time.perf_counter
) -> PassGrid:
    """Time every pass of the grid and leave the model as it was. The runs of different sizes alternate."""
    planes: list[tuple[tuple[float, ...], ...]] = [() for _ in request.batches]
    slots = [model.open(request.contexts[-1] + request.tokens[-1]) for _ in range(request.batches[-1])]
    try:
        for context in request.contexts:
            for slot in slots:
                _fill(model, slot, context)
            for idx, batch in enumerate(request.batches):
                planes[idx] += (_time_row(model, slots[:batch], request, clock),)
    finally:
        for slot in slots:
            model.close(slot)
    return PassGrid(batches=request.batches, contexts=request.contexts, tokens=request.tokens, seconds=tuple(planes))


def _time_row(
    model: LanguageModel, slots: Sequence[int], request: ProfileRequest, clock: Callable[[], float]
) -> tuple[float, ...]:
    """Return the median seconds of a pass for each number of tokens."""
    times: dict[int, list[float]] = {size: [] for size in request.tokens}
    for run_idx in range(request.num_runs + 1):
        for size, found in times.items():
            num_rows = model.num_rows(slots[0])
            extensions = [Extension(slot, [0] * size, range(num_rows - 1, num_rows + size - 1)) for slot in slots]
            started = clock()
            logits = model.forward(extensions)
            logits[-1][-1, 0].item()  # a GPU works on after forward returns: reading a number waits for it
            seconds = clock() - started
            for slot in slots:
                model.keep(slot, num_rows)
            if run_idx:  # the first run of a shape may compile or allocate
                found.append(seconds)
    return tuple(median(times[size]) for size in request.tokens)


def _fill(model: LanguageModel, slot: int, num_rows: int) -> None:
    """Let the sequence hold so many rows."""
    while (held := model.num_rows(slot)) < num_rows:
        count = min(256, num_rows - held)
        model.forward([Extension(slot, [0] * count, range(held - 1, held + count - 1), count - 1)])
