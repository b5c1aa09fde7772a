"""Measure a profile: passes over a grid of sizes, and the time that the workers take around them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from os import getloadavg
from statistics import median

import torch
from torch import Tensor

import card
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.drafter import DrafterWorker
from card.engine.cores import Home, pinned
from card.engine.engine import Engine
from card.engine.forecast import Station
from card.engine.latency import PassCost, measure_pass_cost
from card.engine.switch import Arm
from card.engine.tuned import TunedPolicy
from card.errors import PlanError
from card.messages import Close, DraftSpec, Open
from card.methods import find_method
from card.models.bucketed import make_runner
from card.models.fingerprint import tokenizer_fingerprint
from card.models.inflation import inflate, parse_parameter_count
from card.models.loading import context_limit, load_model, load_tokenizer, parameter_count
from card.models.protocol import Extension, LanguageModel
from card.planner.profile import Overheads, PassGrid, PassTable, Profile, Setup
from card.replica import draft_spec
from card.target import TargetRequest, TargetWorker
from card.writers.beam import BeamWriter
from card.writers.local import find_writer
from card.writers.local.protocol import LocalWriter, WriterSequence

DEFAULT_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
DEFAULT_CONTEXTS = (32, 256, 768)
DEFAULT_BATCHES = (1, 4)
_WIDTHS = (1, 8)  # of the beams whose steps are timed
_NUM_STEPS = 60
_COMMITTED = 3  # tokens of a correction
_EVICTING_BYTES = 1 << 27  # more than the caches of a core hold
_NUM_COLD, _NUM_EVICTIONS = 4, 7
_TEXT_TOKENS = 64
_MAX_MODEL_LEN = 2048
_TREE_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to measure."""

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    target_cost: str | None = None
    threads: tuple[int, ...] = ()  # empty: torch's own number
    tokens: tuple[int, ...] = DEFAULT_TOKENS
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    batches: tuple[int, ...] = DEFAULT_BATCHES
    num_runs: int = 9  # of each pass, after one that does not count
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("tokens", "contexts", "batches", "threads"):
            axis = getattr(self, name)
            if list(axis) != sorted(set(axis)) or any(size < 1 for size in axis):
                raise PlanError(f"{name} must be different numbers of 1 or more in rising order, got {axis}")
        if len(self.tokens) < 2 or not self.contexts or not self.batches or self.num_runs < 1:
            raise PlanError("a profile needs two sizes of tokens or more, a context, a batch and a run")


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
        with pinned(Home((), threads if is_cpu else None)):
            tell(f"measuring passes{f' with {threads} threads' if is_cpu else ''}")
            runner.warm_up(16)
            cost = measure_pass_cost(runner, clock=time.perf_counter)
            table = PassTable(
                points=cost.points, per_sequence_s=cost.per_sequence_s, per_context_row_s=cost.per_context_row_s
            )
            setups.append(Setup(threads=threads if is_cpu else None, cost=table, grid=measure_grid(runner, request)))
    tell("measuring what goes on around the passes")
    with pinned(Home((), min(request.threads, default=1) if is_cpu else None)):
        overheads = measure_overheads(runner)
    cost_of = f"{parameter_count(model) / 1e6:.0f}M (inflated)" if request.target_cost else ""
    return Profile(
        name=request.model,
        measured=True,
        source=request.command or "card profile",
        machine=f"{platform.processor() or platform.machine()} {platform.node()}",
        device=str(runner.device) if is_cpu else torch.cuda.get_device_name(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        num_parameters=own_parameters,
        cost_of=cost_of,
        tokenizer=tokenizer_fingerprint(load_tokenizer(request.model)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), "torch": str(torch.__version__), "card": card.__version__},
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


# ---- what goes on around the passes ---------------------------------------------------------------------------------


class _Timed:
    """A model that counts the seconds of its passes."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.forward_s = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, extensions: Sequence[Extension]) -> list[Tensor]:
        started = time.perf_counter()
        logits = self._model.forward(extensions)
        logits[-1][-1:, :1].tolist()
        self.forward_s += time.perf_counter() - started
        return logits


def measure_overheads(model: LanguageModel) -> Overheads:
    """Run the workers on the model for a moment; what is not in its passes is theirs.

    What takes several processes is not measured: it takes as many times what docs/profile.md says as a round does.
    """
    defaults = Overheads()
    narrow_s, wide_s = (_step_overhead_s(model, width) for width in _WIDTHS)
    node_s = max(0.0, (wide_s - narrow_s) / (_WIDTHS[1] - _WIDTHS[0]))
    round_s = _round_overhead_s(model, "vanilla")
    slower = round_s / defaults.round_s
    return Overheads(
        round_s=round_s,
        tuned_s=max(0.0, _round_overhead_s(model, "suffix") - round_s),
        step_s=max(0.0, narrow_s - node_s),
        node_s=node_s,
        commit_s=_commit_s(model),
        cold_s=_cold_s(model),
        request_s=slower * defaults.request_s,
        message_s=slower * defaults.message_s,
        latency_s=slower * defaults.latency_s,
        source="card profile; request_s, message_s, latency_s: docs/profile.md, by the ratio of round_s",
    )


def _round_overhead_s(model: LanguageModel, name: str) -> float:
    """Return the median seconds of a round of a method beyond its pass."""
    timed, method = _Timed(model), find_method(name)
    writers = {one: find_writer(one)(EngineSettings(), model.vocab_size) for one in method.writers}
    openers = {one: partial(_open_writer, writer) for one, writer in writers.items()}
    worker = TargetWorker(timed, clock=time.perf_counter, writers=openers)  # type: ignore[arg-type]
    stations: dict[Arm, Station] = {"off": Station(Home(), PassCost(((1, 1e-3), (2, 1e-3))))}
    policy = TunedPolicy(stations, DraftSettings()) if method.is_tuned else None
    engine = Engine(worker, None, method, policy=policy)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=_NUM_STEPS, ignore_eos=True)
    request = TargetRequest(
        request_id=0,
        prompt_ids=_text(model),
        params=params,
        draft=DraftSettings(),
        end_ids=frozenset(),
        uses_drafter=False,
    )
    engine.add(request)
    beyond: list[float] = []
    while engine.has_work:
        before_s, started = timed.forward_s, time.perf_counter()
        engine.step()
        beyond.append(time.perf_counter() - started - (timed.forward_s - before_s))
    return median(beyond)


def _open_writer(writer: LocalWriter, request: TargetRequest) -> WriterSequence:
    return writer.open(request.prompt_ids)


def _step_overhead_s(model: LanguageModel, width: int) -> float:
    """Return the median seconds of a drafter pass beyond the model's."""
    timed = _Timed(model)
    worker = DrafterWorker(BeamWriter(timed), clock=time.perf_counter)  # type: ignore[arg-type]
    worker.receive(Open(0, _text(model), _spec(width)))
    worker.step()  # reads the text
    beyond: list[float] = []
    while not worker.is_idle and len(beyond) < _NUM_STEPS // 2:
        before_s, started = timed.forward_s, time.perf_counter()
        worker.step()
        beyond.append(time.perf_counter() - started - (timed.forward_s - before_s))
    worker.receive(Close(0))
    return median(beyond)


def _commit_s(model: LanguageModel) -> float:
    """Return the median seconds in which a drafter takes in a correction that hits."""
    writer = BeamWriter(model)
    beam = writer.open(_text(model), _spec(_WIDTHS[1]), epoch=0)
    times: list[float] = []
    for _ in range(_NUM_STEPS // 4):
        for _ in range(2 * _COMMITTED):
            if frontier := beam.frontier():
                writer.step([(beam, frontier)])
        path = beam.cache.best_path(beam.cache.root_id, _COMMITTED)
        if not path:
            break
        token_ids = [beam.cache.token(node) for node in path]
        started = time.perf_counter()
        beam.commit(token_ids)
        times.append(time.perf_counter() - started)
    beam.close()
    return median(times) if times else Overheads().commit_s


def _cold_s(model: LanguageModel) -> float:
    """Return what the first passes take longer after the caches of a CPU were filled with something else."""
    text = _text(model)
    slot = model.open(len(text) + 1)
    others = torch.zeros(_EVICTING_BYTES // 4)

    def passes_s() -> float:
        started = time.perf_counter()
        for _ in range(_NUM_COLD):
            model.forward([Extension(slot, [0], [len(text) - 1])])[0][-1, 0].item()
            model.keep(slot, len(text))
        return time.perf_counter() - started

    try:
        (logits,) = model.forward([Extension(slot, text, range(-1, len(text) - 1), len(text) - 1)])
        if logits.device.type != "cpu":
            return 0.0
        warm_s = median(passes_s() for _ in range(_NUM_EVICTIONS))
        cold: list[float] = []
        for _ in range(_NUM_EVICTIONS):
            others.add_(1.0)
            cold.append(passes_s())
        return max(0.0, median(cold) - warm_s)
    finally:
        model.close(slot)


def _text(model: LanguageModel) -> tuple[int, ...]:
    return tuple(i % model.vocab_size for i in range(_TEXT_TOKENS))


def _spec(width: int) -> DraftSpec:
    draft = DraftSettings(beam_width=width, lead=_NUM_STEPS, min_path_logprob=-1e9)
    return draft_spec(draft, SamplingParams(temperature=0.0, seed=0), _TEXT_TOKENS + 2 * _NUM_STEPS)
