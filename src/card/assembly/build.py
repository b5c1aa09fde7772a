"""Make an engine as a plan says, of models that are there: real ones, or such as take virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from card.assembly.plan import Latencies, Plan
from card.config import Schedule
from card.drafting.local import find_writer
from card.drafting.local.protocol import LocalWriter, WriterSequence
from card.engine.engine import Engine
from card.engine.policy.rounds import Policy, ScheduleCost
from card.engine.policy.tuned import TunedPolicy
from card.engine.queue import Limits
from card.engine.request import Request
from card.engine.target import OpenWriter, TargetWorker
from card.engine.watchers import Watchers
from card.errors import SettingsError
from card.links.link import DrafterLink
from card.models.protocol import LanguageModel, Recurrent, sequence_bytes
from card.models.rows.prefix_cache import PrefixCache
from card.models.rows.row_store import RowStore
from card.text.fit import tokenizer_fingerprint
from card.text.following import AtOnce, Lanes
from card.text.tokenizer import Tokenizer

_FIRST_DRAFT_SHARE = 0.1  # assumed drafter pass over target pass, until the drafter's is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models that an engine runs."""

    target: LanguageModel
    link: DrafterLink | None = None  # to the drafter, if there is one
    latencies: Latencies | None = None  # for a policy that tunes itself
    watchers: Watchers | None = None  # of the target's features
    writers: Mapping[str, LocalWriter] | None = None  # the plan's, attached to the target; None: to be made
    prefixes: PrefixCache | None = None  # keeps rows of long beginnings in files
    lanes: Lanes = field(default_factory=AtOnce)  # where the masks of grammars are computed


@dataclass(frozen=True, slots=True)
class Parts:
    """An engine and what it is made of."""

    plan: Plan
    engine: Engine
    worker: TargetWorker
    policy: Policy
    link: DrafterLink | None
    clock: Callable[[], float]
    writers: Mapping[str, LocalWriter]  # those without a model

    def close(self) -> None:
        """End the local writers, and write what outlives the process. The caller that made the link closes it."""
        self.worker.pool.close_prefixes()
        for writer in self.writers.values():
            writer.close()


def build(
    plan: Plan, models: Models, *, clock: Callable[[], float] = time.perf_counter, policy: Policy | None = None
) -> Parts:
    """Return the engine of a plan.

    Args:
        clock: seconds; all times in statistics are its own.
        policy: None: as the plan says, which may measure passes.
    Raises: SettingsError for settings that a local writer or the target cannot follow.
    """
    policy = policy or make_policy(plan, models.latencies)
    made_here = make_writers(plan, models.target.vocab_size, None) if models.writers is None else {}
    with closed_if_it_fails(made_here):
        _refuse_features(made_here)
        writers = made_here if models.writers is None else models.writers
        worker = _worker(plan, models, writers, clock)
        limits = Limits(max_num_seqs=plan.settings.max_num_seqs, prefill_chunk=plan.settings.prefill_chunk)
        engine = Engine(worker, models.link, limits=limits, policy=policy, clock=clock)
    return Parts(plan, engine, worker, policy, models.link, clock, writers)


def _worker(plan: Plan, models: Models, writers: Mapping[str, LocalWriter], clock: Callable[[], float]) -> TargetWorker:
    return TargetWorker(
        models.target,
        clock=clock,
        max_kv_bytes=plan.max_kv_bytes,
        writers={name: _opener(writer) for name, writer in writers.items()},
        top_k=max((writer.top_k for writer in writers.values()), default=0),
        verifier=plan.verifier,
        watchers=models.watchers,
        self_drafting=plan.self_drafting,
        row_store=_row_store(plan),
        may_grow=_is_memory_short(plan, models.target),
        prefixes=models.prefixes,
        lanes=models.lanes,
        foresees=plan.foresees,
    )


def _row_store(plan: Plan) -> RowStore | None:
    """Return where paused requests have their rows: as many bytes in files as in memory. Raises: SettingsError."""
    folder, most = plan.settings.kv_offload, plan.max_kv_bytes
    return None if folder is None or most is None else RowStore(folder, most)


def _is_memory_short(plan: Plan, target: LanguageModel) -> bool:
    """Return whether fewer requests than may run at once have room for their longest texts; states cannot be moved."""
    if plan.max_kv_bytes is None or isinstance(target, Recurrent):
        return False
    longest = sequence_bytes(target, plan.max_model_len + plan.target_tree_rows)
    return plan.max_kv_bytes < plan.settings.max_num_seqs * longest


def make_writers(plan: Plan, vocab_size: int, tokenizer: Tokenizer | None) -> dict[str, LocalWriter]:
    """Return the local writers. Raises: SettingsError for settings that one of them cannot follow.

    Args:
        tokenizer: the target's; None tells its tokenizer from others by its size alone.
    """
    kinds = {name: find_writer(name) for name in plan.writers}
    fingerprint = ""
    if tokenizer is not None and any(kind.outlives_engine for kind in kinds.values()):
        fingerprint = tokenizer_fingerprint(tokenizer)  # half a second for a large vocabulary
    writers: dict[str, LocalWriter] = {}
    with closed_if_it_fails(writers):
        for name, kind in kinds.items():
            writers[name] = kind(plan.settings, vocab_size, fingerprint)
    return writers


@contextmanager
def closed_if_it_fails(writers: Mapping[str, LocalWriter]) -> Iterator[None]:
    """Close local writers if the block raises: no engine closes them then."""
    try:
        yield
    except BaseException:
        for writer in writers.values():
            writer.close()
        raise


def _refuse_features(writers: Mapping[str, LocalWriter]) -> None:
    for name, writer in writers.items():
        if writer.reads_states:
            raise SettingsError(
                f"the writer {name} reads the target's hidden states, which are not available here; leave it out"
            )


def make_policy(plan: Plan, latencies: Latencies | None) -> Policy:
    """Return the policy of an engine: what was set, and for a tuned method the rest by measurement."""
    is_tuned = plan.method.is_tuned and (plan.placements or plan.writers) and plan.settings.policy != "fixed"
    if not is_tuned:
        return Policy(plan.first_schedule, plan.cores_of(plan.first_schedule))
    assert latencies is not None, "a policy that tunes itself needs latencies"
    return TunedPolicy(schedule_costs(plan, latencies), plan.draft, pinned=plan.pinned)


def schedule_costs(plan: Plan, latencies: Latencies) -> dict[Schedule, ScheduleCost]:
    """Return the schedules that a tuned method may choose from, and what passes cost under each."""
    costs = {schedule: _cost(plan, schedule, latencies) for schedule in plan.placements}
    if not costs or plan.settings.schedule == "auto":
        costs["off"] = replace(costs["turns"], drafter=None) if "turns" in costs else _cost(plan, "off", latencies)
    return costs


def _cost(plan: Plan, schedule: Schedule, latencies: Latencies) -> ScheduleCost:
    target = latencies.target(plan, schedule)
    if schedule == "off":
        return ScheduleCost(plan.cores_of(schedule), target)
    known = (latencies.drafter(plan, one) for one in (schedule, *plan.placements))
    drafter = next((cost for cost in known if cost is not None), None)
    return ScheduleCost(plan.cores_of(schedule), target, drafter or target.scaled(_FIRST_DRAFT_SHARE))


def _opener(writer: LocalWriter) -> OpenWriter:
    def begin(request: Request) -> WriterSequence:
        sequence = writer.open(request.drafted_prompt_ids)
        if request.prediction_ids:
            sequence.expect(request.prediction_ids)
        return sequence

    return begin
