"""A pair on some hardware, and the engine that a host would build for it, on replayed models in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from card.config import DraftSettings, EngineSettings, SamplingParams, split_settings
from card.engine.engine import Engine, Limits
from card.engine.links import Where, tree_rows
from card.engine.placing import choose_where, make_policy, round_length, share_out
from card.errors import PlanError
from card.methods import Method, find_method
from card.planner.profile import Overheads, Profile, Setup, TrueCost
from card.planner.recording import Recording
from card.planner.replay import PassSize, ReplayedModel, ReplayedTexts
from card.planner.virtual import VirtualClock, VirtualDrafter, VirtualLink, World
from card.policy.cores import CoreSet
from card.policy.cost import ScheduleCost
from card.policy.rounds import Policy
from card.policy.tuned import TunedPolicy
from card.transport.inline import InlineLink
from card.transport.link import DrafterLink
from card.transport.switch import SwitchLink
from card.workers.drafter import DrafterWorker
from card.workers.request import Request
from card.workers.target import OpenWriter, TargetWorker
from card.writers.beam import BeamWriter
from card.writers.local import find_writer
from card.writers.local.protocol import LocalWriter

KNOWN_ENGINE_SETTINGS = frozenset(
    {"placement", "schedule", "policy", "writers", "max_num_seqs", "prefill_chunk", "threads"}
)
_LEAST_MODEL_LEN = 4096
_SPARE_ROWS = 64  # as `card.api.host` adds
_TOKENS_PER_PASS = {"inline": 256, "switch": 256, "thread": 256, "process": 512, "remote": 256}
_LEAST_CANDIDATES = 8
_GREEDY = SamplingParams(temperature=0.0, seed=0)
_THREAD_LATENCY_S = 2e-5  # of a message between threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A pair, what it did, and the hardware to plan for."""

    target: Profile
    recording: Recording
    draft: Profile | None = None
    cores: int | None = None  # CPU threads of target and drafter together; None: the most that the target has
    draft_threads: int = 1  # of a drafter in its own process
    network_s: float | None = None  # one way to a draft server; None: the drafter is on the target's machine
    concurrency: int = 1  # requests at once
    draft_factor: float = 1.0  # drafter passes take so many times what its profile, and it itself, says

    def __post_init__(self) -> None:
        fingerprints = {
            "target": self.target.tokenizer,
            "draft": self.draft.tokenizer if self.draft else "",
            "recording": self.recording.tokenizer,
        }
        known = {name: fingerprint for name, fingerprint in fingerprints.items() if fingerprint}
        if len(set(known.values())) > 1:
            raise PlanError(
                f"{' and '.join(known)} are not of one tokenizer; use profiles and a recording of the same pair"
            )
        for name, least in (("concurrency", 1), ("draft_threads", 1), ("draft_factor", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} must be {least:g} or more, got {getattr(self, name)}")
        if self.cores is not None and self.cores < 1:
            raise PlanError(f"cores must be 1 or more, got {self.cores}")
        if self.network_s is not None and not 0 <= self.network_s < math.inf:
            raise PlanError(f"the delay of the network must be 0 seconds or more, got {self.network_s}")

    @property
    def num_threads(self) -> int | None:
        """CPU threads of the machine; None where there are none to share out."""
        return self.target.max_threads if self.cores is None else self.cores


@dataclass(frozen=True, slots=True)
class Plan:
    """How `card.api.host` would set a method up."""

    method: Method
    settings: EngineSettings
    draft: DraftSettings
    pinned: frozenset[str]
    where: Where | None  # None: no drafter
    writers: tuple[str, ...]
    alone: Setup  # of the target with all cores
    beside: Setup  # beside a drafter
    own_draft: Setup | None  # of a drafter that takes turns
    far_draft: Setup | None  # of one that runs by itself


@dataclass(slots=True)
class Stage:
    """One engine in virtual time."""

    plan: Plan
    engine: Engine
    clock: VirtualClock
    policy: Policy
    has_link: bool
    local: Mapping[str, LocalWriter] = field(default_factory=dict)

    def close(self) -> None:
        """End the local writers."""
        for writer in self.local.values():
            writer.close()


def plan_method(scene: Scene, name: str, changes: Mapping[str, Any]) -> Plan:
    """Return how a method would be set up with these settings.

    Raises: SettingsError for settings that do not go together; PlanError for those that a plan knows nothing of, or a
        method without the profile that it needs.
    """
    engine_changes, draft_changes = split_settings(changes)
    for unknown in sorted(engine_changes.keys() - KNOWN_ENGINE_SETTINGS):
        raise PlanError(
            f"a plan cannot follow {unknown}; it knows {', '.join(sorted(KNOWN_ENGINE_SETTINGS))} and how to draft"
        )
    method = find_method(name)
    device = "cpu" if scene.num_threads is not None else "cuda"
    settings = EngineSettings(method=name, device=device, **{"max_num_seqs": scene.concurrency} | engine_changes)
    drafts, writers = share_out(method, settings.writers)
    if drafts and scene.draft is None:
        raise PlanError(f"method {name} needs the profile of a draft model; give --draft")
    threads = scene.num_threads
    alone = _target_setup(scene, threads, settings)
    where = _where(scene, method, settings) if drafts else None
    beside, own_draft, far_draft = alone, None, None
    if scene.draft is not None and where is not None:
        if where in ("process", "switch") and threads is not None:
            if threads <= scene.draft_threads:
                raise PlanError(f"{threads} cores leave none for the target beside a drafter; set schedule turns")
            beside = _target_setup(scene, threads - scene.draft_threads, settings)
        if where in ("inline", "switch"):
            own_draft = scene.draft.setup_of(alone.threads)  # the target's threads, whether it needs them or not
        far_draft = scene.draft.setup_of(scene.draft_threads) if where != "inline" else None
    asked = DraftSettings(**draft_changes)
    draft = method.shape(asked)
    if method.length_from_latencies and where is not None and "num_speculative_tokens" not in draft_changes:
        core_set = beside if where in ("process", "switch") else alone
        drafting = far_draft or own_draft
        assert drafting is not None
        costs = {"target": core_set.pass_cost(), "drafter": drafting.pass_cost()}
        length = round_length(method, asked, **costs, most=_model_len(scene))
        draft = method.shape(asked.replace(num_speculative_tokens=length))
    pinned = frozenset(draft_changes)
    return Plan(method, settings, draft, pinned, where, writers, alone, beside, own_draft, far_draft)


def _target_setup(scene: Scene, most_threads: int | None, settings: EngineSettings) -> Setup:
    """Return how the target runs on so many cores: with as many threads as are useful, unless it was told how many."""
    if settings.threads is None or most_threads is None:
        return scene.target.setup(most_threads)
    return scene.target.setup_of(min(settings.threads, most_threads))


def _where(scene: Scene, method: Method, settings: EngineSettings) -> Where:
    if scene.network_s is not None:
        return "remote"
    has_cores = scene.num_threads is None or scene.num_threads > scene.draft_threads
    return choose_where(method, settings, is_loaded=False, has_cores=has_cores)


def build_stage(
    scene: Scene,
    plan: Plan,
    texts: ReplayedTexts,
    *,
    clock: VirtualClock | None = None,
    shared: tuple[World, int] | None = None,
) -> Stage:
    """Return an engine with its drafter.

    Args:
        shared: a world with a drafter for several targets, and which of them this is; None gives it one of its own.
    """
    clock = clock or VirtualClock()
    policy = policy_of(plan)
    overheads = scene.target.overheads or Overheads()
    caches = _Caches()
    target = _target_model(scene, plan, texts, clock, policy, caches)
    link: DrafterLink | None = None
    if plan.where is not None:
        far: DrafterLink | None = None
        if plan.far_draft is not None:
            world, target_idx = shared or (World(make_drafter(scene, plan, texts), [clock]), 0)
            far = VirtualLink(world, target_idx, message_s=overheads.message_s)
        near = _inline_link(scene, plan, plan.own_draft, texts, clock, caches) if plan.own_draft is not None else None
        link = SwitchLink(far, near, clock) if far and near else far or near
    local = {name: find_writer(name)(plan.settings, texts.vocab_size) for name in plan.writers}
    worker = TargetWorker(
        target,
        clock=clock,
        writers={name: _beginner(writer) for name, writer in local.items()},
        top_k=max((writer.top_k for writer in local.values()), default=0),
    )
    limits = Limits(max_num_seqs=plan.settings.max_num_seqs, prefill_chunk=plan.settings.prefill_chunk)
    engine = Engine(worker, link, plan.method, limits=limits, policy=policy, clock=clock)
    return Stage(plan, engine, clock, policy, link is not None, local)


def policy_of(plan: Plan) -> Policy:
    """Return the policy that `card.api.host` would make."""

    def costs() -> tuple[ScheduleCost, ScheduleCost]:
        own = plan.own_draft.pass_cost() if plan.own_draft else None
        far = plan.far_draft.pass_cost() if plan.far_draft else own
        alone = ScheduleCost(CoreSet(), plan.alone.pass_cost(), own)
        return alone, ScheduleCost(CoreSet(), plan.beside.pass_cost(), far)

    return make_policy(
        plan.method,
        plan.settings,
        plan.draft,
        costs,
        where=plan.where,
        pinned=plan.pinned,
        has_writers=bool(plan.writers),
    )


def make_drafter(scene: Scene, plan: Plan, texts: ReplayedTexts, num_targets: int = 1) -> VirtualDrafter:
    """Return a drafter that runs by itself, on a time line of its own."""
    assert plan.where is not None and plan.far_draft is not None
    clock = VirtualClock()
    latency_s = (scene.target.overheads or Overheads()).latency_s
    delay_s = _THREAD_LATENCY_S if plan.where == "thread" else latency_s + (scene.network_s or 0.0)
    return VirtualDrafter(
        BeamWriter(_draft_model(scene, plan, plan.far_draft, texts, clock), kv_cache_bytes=1 << 40),
        clock,
        num_targets=num_targets,
        delay_s=delay_s,
        max_tokens_per_pass=_TOKENS_PER_PASS[plan.where],
    )


def replayed_texts(scene: Scene, plan: Plan) -> ReplayedTexts:
    """Return the texts of the recording with as many candidates as the plan looks at. Raises: PlanError."""
    wanted = max(plan.draft.branch, min(_LEAST_CANDIDATES, scene.recording.num_candidates))
    return ReplayedTexts(scene.recording, wanted)


class TextEnd:
    """Ends a text where the recorded one did."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def feed(self, token_id: int) -> bool:
        """Return True at the last token."""
        self._left -= 1
        return self._left == 0


def make_request(stage: Stage, scene: Scene, texts: ReplayedTexts, text_idx: int, request_id: int) -> Request:
    """Return a request for one recorded text; it is decoded greedily, whatever it was recorded with."""
    text = scene.recording.texts[text_idx]
    num_tokens = len(text.token_ids)
    is_stopped = text.finish_reason == "stop"
    return Request(
        request_id=request_id,
        prompt_ids=texts.prompts[text_idx],
        params=_GREEDY.replace(max_tokens=max(scene.recording.max_tokens, num_tokens) if is_stopped else num_tokens),
        draft=stage.plan.draft,
        end_ids=frozenset(),
        stop_check=TextEnd(num_tokens) if is_stopped else None,
        uses_drafter=stage.has_link,
    )


# ---- models that take time ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Caches:
    """Whether the target's weights have driven those of a drafter on the same cores out."""

    are_targets: bool = False


def _target_model(
    scene: Scene, plan: Plan, texts: ReplayedTexts, clock: VirtualClock, policy: Policy, caches: _Caches
) -> ReplayedModel:
    """Return the target; its passes take the time of where the policy lets it run, its rounds what goes beyond."""
    overheads = scene.target.overheads or Overheads()
    factor = overheads.beside_factor if plan.where in ("process", "switch") else 1.0
    costs = {False: TrueCost(plan.alone), True: TrueCost(plan.beside, factor)}
    is_tuned = isinstance(policy, TunedPolicy)
    rounds_s = {
        drafts: overheads.of_round(plan.writers, is_tuned=is_tuned, has_drafter=drafts) for drafts in (False, True)
    }
    unpaid_s = 0.0  # of the present round

    def on_pass(size: PassSize) -> None:
        nonlocal unpaid_s
        is_beside, has_rested = policy.schedule == "beside", caches.are_targets  # in turns: since the last pass
        caches.are_targets = True
        clock.advance(costs[is_beside].seconds(size.num_tokens, size.num_sequences, size.num_context_rows))
        drafts = plan.where is not None and (is_beside or not has_rested)
        drafted_s = size.num_sequences * overheads.drafted_request_s if drafts else 0.0
        unpaid_s = rounds_s[drafts] + drafted_s + (size.num_sequences - 1) * overheads.request_s

    def on_keep() -> None:
        nonlocal unpaid_s
        clock.advance(unpaid_s)  # after the pass was timed, where the real ones take their time, too
        unpaid_s = 0.0

    num_tree_rows = plan.draft.budget + _SPARE_ROWS
    return ReplayedModel(
        texts,
        "target",
        max_model_len=_model_len(scene),
        num_tree_rows=num_tree_rows,
        on_pass=on_pass,
        on_keep=on_keep,
    )


def _draft_model(
    scene: Scene,
    plan: Plan,
    setup: Setup,
    texts: ReplayedTexts,
    clock: VirtualClock,
    caches: _Caches | None = None,
) -> ReplayedModel:
    """Return a draft model; its passes take their time and that of the step around them.

    Args:
        caches: those that it shares with the target; None if they run at the same time.
    """
    assert scene.draft is not None
    overheads = scene.draft.overheads or Overheads()
    shares_machine = caches is None and plan.where in ("process", "switch")
    factor = scene.draft_factor * (overheads.beside_factor if shares_machine else 1.0)
    cost = TrueCost(setup, factor)

    def on_pass(size: PassSize) -> None:
        pass_s = cost.seconds(size.num_tokens, size.num_sequences, size.num_context_rows)
        clock.advance(pass_s + factor * (overheads.step_s + overheads.node_s * size.num_logits))
        if caches is not None and caches.are_targets:
            caches.are_targets = False
            clock.advance(overheads.cold_s)

    return ReplayedModel(
        texts,
        "draft",
        max_model_len=_model_len(scene),
        num_tree_rows=tree_rows(plan.draft),
        on_pass=on_pass,
        on_keep=lambda: clock.advance(factor * overheads.commit_s),
    )


def _inline_link(
    scene: Scene, plan: Plan, setup: Setup, texts: ReplayedTexts, clock: VirtualClock, caches: _Caches
) -> InlineLink:
    writer = BeamWriter(_draft_model(scene, plan, setup, texts, clock, caches), kv_cache_bytes=1 << 40)
    return InlineLink(DrafterWorker(writer, clock=clock, max_tokens_per_pass=_TOKENS_PER_PASS["inline"]))


def _model_len(scene: Scene) -> int:
    longest = max(len(text.prompt_ids) + len(text.token_ids) for text in scene.recording.texts)
    return max(_LEAST_MODEL_LEN, longest + scene.recording.max_tokens)


def _beginner(writer: LocalWriter) -> OpenWriter:
    return lambda request: writer.open(request.prompt_ids)
