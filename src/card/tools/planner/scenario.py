"""A pair on some hardware, and its engine on replayed models in virtual time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from card.assembly.build import Models, Parts, build
from card.assembly.drafters import link_here
from card.assembly.latency.threads import AS_FAST
from card.assembly.plan import Facts, Plan, readable, resolve
from card.config import SamplingParams, Schedule
from card.config.fields import check, setting
from card.config.method import Method
from card.config.registry import find_method
from card.config.splitting import split_settings
from card.drafting.draft_writers import make_writer
from card.drafting.local import find_writer
from card.drafting.local.protocol import LocalWriter
from card.drafting.protocol import DraftWriter
from card.engine.request import Request
from card.engine.watchers import Watchers
from card.errors import PlanError
from card.links.link import DrafterLink
from card.links.shown_states import ShownStates
from card.links.switch import SwitchLink
from card.machine.importing import load_place
from card.machine.pass_cost import PassCost
from card.machine.threads import CorePlan, CoreSet
from card.models.features import FeatureConsumer
from card.models.parallel_draft import ParallelDraft
from card.tools.planner.own_drafts import HEAD, check_exact, has_own_drafter
from card.tools.planner.profile import Profile, Setup
from card.tools.planner.recording import Recording
from card.tools.planner.replay import BLANK_STATES, BlankInputs, PassSize, ReplayedHead, ReplayedModel
from card.tools.planner.replayed_texts import ReplayedTexts, TextEnd
from card.tools.planner.virtual_time import VirtualClock, VirtualDrafter, VirtualLink, VirtualWriter

KNOWN_ENGINE_SETTINGS = frozenset(
    {"placement", "schedule", "policy", "writers", "max_num_seqs", "prefill_chunk", "threads", "kv_selection"}
)
_LEAST_CANDIDATES = 8
_FEW_TOKENS = 4  # of a verification, as of `Profile.setup`
_GREEDY = SamplingParams(temperature=0.0, seed=0).resolved()
_THREAD_LATENCY_S = 2e-5  # of a message between threads
_SERVER = "tcp://planned:1"  # the draft server of a scenario with a network
_ROOM_BYTES = 1 << 40  # for the KV of drafters: a replayed model has none
_STATE_WRITER = "card.family.states.writer:StateWriter"
_ANYWHERE = CorePlan(CoreSet(), CoreSet(), ())  # in virtual time no thread is pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A pair, its recording, and the hardware to plan for."""

    target: Profile
    recording: Recording
    draft: Profile | None = None
    cores: int | None = setting(None, least=1)  # of both models; None: the most of the target's profile
    draft_threads: int = setting(1, least=1)  # of a drafter in its own process
    network_s: float | None = setting(None, least=0, below=math.inf)  # one-way delay of a draft server; None: local
    has_draft_here: bool = False  # beside that draft server: a drafter in turns, too
    concurrency: int = setting(1, least=1)  # requests at once
    draft_factor: float = setting(1.0, least=0, below=math.inf)  # by which drafter passes take longer than profiled

    def __post_init__(self) -> None:
        check(self, error=PlanError)
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
        if self.reads_states and self.network_s is not None:
            raise PlanError(
                "a block or head reads its target's states, which do not leave the process: plan it without a draft "
                "server"
            )

    @property
    def reads_states(self) -> bool:
        """True if a block or a head drafts, from the target's states."""
        return self.draft is not None and self.draft.reads_states

    @property
    def num_threads(self) -> int | None:
        """CPU threads of the machine; None for a device without threads."""
        return self.target.max_threads if self.cores is None else self.cores


@dataclass(frozen=True, slots=True)
class Setups:
    """Ways of running the models, one for each schedule of a plan."""

    alone: Setup  # of the target with all cores
    beside: Setup  # beside a drafter
    own_draft: Setup | None  # of a drafter in turns
    far_draft: Setup | None  # of a drafter in its own process, or of a draft server


@dataclass(frozen=True, slots=True)
class _ProfiledLatencies:
    """Costs of passes from the profiles."""

    scenario: Scenario

    def with_useful_threads(self, cores: CorePlan) -> CorePlan:
        """Return the cores unchanged: `setups_of` finds the fastest number of threads."""
        return cores

    def target(self, plan: Plan, schedule: Schedule) -> PassCost:
        """Return the cost of the target's passes under a schedule."""
        setups = setups_of(self.scenario, plan)
        return (setups.beside if schedule == "beside" else setups.alone).pass_cost()

    def drafter(self, plan: Plan, schedule: Schedule) -> PassCost | None:
        """Return the cost of the drafter's passes under a schedule."""
        setups = setups_of(self.scenario, plan)
        setup = setups.far_draft if schedule == "beside" else setups.own_draft
        return setup.pass_cost() if setup is not None else None


def plan_method(scenario: Scenario, name: str, changes: Mapping[str, Any]) -> Plan:
    """Return the engine's plan of a method with these settings.

    Raises: SettingsError for settings that contradict each other; PlanError for settings that a plan cannot follow, or
        for a method without the profile that it needs.
    """
    method = find_method(name)
    check_exact(method)
    _check_recorded(scenario.recording, method)
    engine_changes, _ = split_settings(changes)
    asked = engine_changes.keys() - {"own"} | engine_changes.get("own", {}).keys()
    for unknown in sorted(asked - KNOWN_ENGINE_SETTINGS):
        raise PlanError(
            f"a plan cannot follow {unknown}; it knows {', '.join(sorted(KNOWN_ENGINE_SETTINGS))} and how to draft"
        )
    hardware: dict[str, Any] = {"device": "cuda" if scenario.num_threads is None else "cpu"}
    if scenario.network_s is not None:
        hardware["draft_address"] = _SERVER
    longest = max(len(text.prompt_ids) + len(text.token_ids) for text in scenario.recording.texts)
    facts = Facts(
        has_draft=scenario.network_s is None or scenario.has_draft_here,
        wants_states=scenario.reads_states,
        cores=None if scenario.num_threads is None else tuple(range(scenario.num_threads)),
        spare_cores=_spare_cores(scenario),
        longest_text=longest + scenario.recording.max_tokens,
        latencies=_ProfiledLatencies(scenario),
    )
    asked = {"max_num_seqs": scenario.concurrency, "draft_threads": scenario.draft_threads, **changes, **hardware}
    plan = resolve(readable(asked, name), facts, method=name)
    setups_of(scenario, plan)
    return replace(plan, cores=_ANYWHERE)


def _spare_cores(scenario: Scenario) -> int:
    """Return the cores that a drafter's process may take because the target is as fast without them."""
    threads = scenario.num_threads
    least = min((setup.threads for setup in scenario.target.setups if setup.threads is not None), default=0)
    if threads is None or threads - scenario.draft_threads < least:
        return 0
    with_all, without = (scenario.target.setup(count) for count in (threads, threads - scenario.draft_threads))
    is_as_fast = without.pass_cost().seconds(_FEW_TOKENS) <= AS_FAST * with_all.pass_cost().seconds(_FEW_TOKENS)
    return scenario.draft_threads if is_as_fast else 0


def _check_recorded(recording: Recording, method: Method) -> None:
    """Raise PlanError if a method has a drafter of its own whose drafts were not recorded."""
    is_known = all(
        text.head is not None if method.needs_head else method.name in text.drafted for text in recording.texts
    )
    if has_own_drafter(method) and not is_known:
        head = " --ctc FILE" if method.needs_head else ""
        raise PlanError(
            f"the recording does not say what {method.name} drafts; make it with card record --methods {method.name}"
            f"{head}"
        )


def setups_of(scenario: Scenario, plan: Plan) -> Setups:
    """Return the setups of a plan's models. Raises: PlanError if a profile is missing, or has too many threads."""
    threads = scenario.num_threads
    alone = beside = _target_setup(scenario, threads, plan)
    if not plan.placements:
        return Setups(alone, beside, None, None)
    if scenario.draft is None:
        raise PlanError(f"method {plan.method.name} needs the profile of a draft model; give --draft")
    if plan.has_drafter_process and threads is not None:
        if threads <= scenario.draft_threads:
            raise PlanError(f"{threads} cores leave none for the target beside a drafter; set schedule turns")
        beside = _target_setup(scenario, threads - scenario.draft_threads, plan)
    near = scenario.draft.setup_of(alone.threads) if "turns" in plan.placements else None  # as many as the target
    far = scenario.draft.setup_of(scenario.draft_threads) if "beside" in plan.placements else None
    return Setups(alone, beside, near, far)


def _target_setup(scenario: Scenario, most_threads: int | None, plan: Plan) -> Setup:
    """Return the target's setup: the fastest with at most ``most_threads``, unless the settings fix the number."""
    if plan.settings.threads is None or most_threads is None:
        return scenario.target.setup(most_threads)
    return scenario.target.setup_of(min(plan.settings.threads, most_threads))


def build_stage(
    scenario: Scenario,
    plan: Plan,
    texts: ReplayedTexts,
    *,
    drafter: VirtualDrafter | None = None,
    consumers: Sequence[FeatureConsumer] = (),
) -> Parts:
    """Return an engine with its drafter, in virtual time.

    Args:
        drafter: the one outside the target's thread, if the plan has one; None makes it.
        consumers: shown what the target writes; its states are blank.
    """
    clock, shown = VirtualClock(), _Shown()
    far: DrafterLink | None = None
    near: DrafterLink | None = None
    if "beside" in plan.placements:
        drafter = drafter or _drafter(scenario, plan, texts)
        far = VirtualLink(drafter, clock, message_s=scenario.target.overheads.message_s)
    if "turns" in plan.placements:
        model = draft_model(scenario, plan, texts, clock, shown)
        near = link_here("inline", _draft_writer(scenario, plan, model, takes_turns=True), clock=clock)
    link = SwitchLink(far, near, clock) if far and near else far or near
    target = _target_model(scenario, plan, texts, clock, shown)
    latencies = _ProfiledLatencies(scenario)
    writers = {name: _timed_writer(scenario, plan, texts, name, clock) for name in plan.writers}
    shown_to = [*consumers, *([ShownStates(link, BLANK_STATES)] if link and scenario.reads_states else [])]
    watchers = Watchers(target.features, shown_to) if shown_to else None
    models = Models(target=target, link=link, latencies=latencies, writers=writers, watchers=watchers)
    shown.parts = build(plan, models, clock=clock)
    return shown.parts


def _timed_writer(scenario: Scenario, plan: Plan, texts: ReplayedTexts, name: str, clock: VirtualClock) -> LocalWriter:
    """Return a local writer whose proposals take time: a constant for a head, else in proportion to their number.

    Raises: SettingsError for settings that it cannot follow.
    """
    overheads = scenario.target.overheads
    if name == HEAD:
        return VirtualWriter(ReplayedHead(texts), clock, lambda _: overheads.by_writer.get(HEAD, 0.0))
    writer = find_writer(name)(plan.settings, texts.vocab_size, "")
    return VirtualWriter(writer, clock, partial(overheads.of_proposal, name))


def _draft_writer(scenario: Scenario, plan: Plan, model: ReplayedModel, *, takes_turns: bool) -> DraftWriter:
    if scenario.reads_states:
        writer: DraftWriter = load_place(_STATE_WRITER)(model, BlankInputs(), _ROOM_BYTES)
        return writer
    parallel, length = None, plan.draft.num_speculative_tokens
    if plan.method.needs_parallel_draft:
        parallel = ParallelDraft(
            mask_id=model.mask_id, num_tokens=length, temperatures=(1.0,) * length, vocab_size=model.vocab_size + 1
        )
    return make_writer(model, _ROOM_BYTES, takes_turns=takes_turns, parallel=parallel)


def _drafter(scenario: Scenario, plan: Plan, texts: ReplayedTexts) -> VirtualDrafter:
    """Return a drafter outside the target's thread, with a clock of its own."""
    clock = VirtualClock()
    is_thread = plan.placements["beside"] == "thread"
    delay_s = _THREAD_LATENCY_S if is_thread else scenario.target.overheads.latency_s + (scenario.network_s or 0.0)
    writer = _draft_writer(scenario, plan, draft_model(scenario, plan, texts, clock), takes_turns=False)
    return VirtualDrafter(writer, clock, delay_s=delay_s)


def replayed_texts(scenario: Scenario, plan: Plan) -> ReplayedTexts:
    """Return the texts of the recording with as many candidates as the plan reads. Raises: PlanError."""
    wanted = max(plan.draft.branch, min(_LEAST_CANDIDATES, scenario.recording.num_candidates))
    method = plan.method
    by_method = method.name if has_own_drafter(method) and not method.needs_head else None
    return ReplayedTexts(scenario.recording, wanted, drafted_by_method=by_method, has_head=HEAD in plan.writers)


def make_request(parts: Parts, scenario: Scenario, texts: ReplayedTexts, text_idx: int, request_id: int) -> Request:
    """Return a request for one recorded text; it is decoded greedily, independent of the recording's sampling."""
    text = scenario.recording.texts[text_idx]
    num_tokens = len(text.token_ids)
    is_stopped = text.finish_reason == "stop"
    return Request(
        request_id=request_id,
        prompt_ids=texts.prompts[text_idx],
        params=_GREEDY.replace(max_tokens=max(scenario.recording.max_tokens, num_tokens) if is_stopped else num_tokens),
        draft=parts.plan.draft,
        end_ids=frozenset(),
        stop_check=TextEnd(num_tokens) if is_stopped else None,
        uses_drafter=parts.link is not None,
    )


# ---- models that take time -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Shown:
    """State that the two models of a scenario share while it runs."""

    parts: Parts | None = None
    are_targets: bool = False  # the CPU's caches hold the target's weights, and none of the drafter's
    are_cool: bool = False  # a drafter's first pass has fetched most of its weights, but not all


def _is_tuned(plan: Plan) -> bool:
    """Return whether the policy of a plan tunes itself."""
    return plan.method.is_tuned and bool(plan.placements or plan.writers) and plan.settings.policy != "fixed"


def _target_model(
    scenario: Scenario, plan: Plan, texts: ReplayedTexts, clock: VirtualClock, shown: _Shown
) -> ReplayedModel:
    """Return the target; its passes take the time of the policy's schedule, and its rounds their overhead."""
    overheads, setups = scenario.target.overheads, setups_of(scenario, plan)
    factor = overheads.beside_factor if plan.has_drafter_process else 1.0
    costs = {False: setups.alone.true_cost(), True: setups.beside.true_cost(factor)}
    unpaid_s = 0.0  # of the present round

    def on_pass(size: PassSize) -> None:
        nonlocal unpaid_s
        assert shown.parts is not None
        policy = shown.parts.policy
        is_beside, has_rested = policy.schedule == "beside", shown.are_targets  # in turns: since the last pass
        shown.are_targets = True
        clock.advance(costs[is_beside].seconds(size.num_tokens, size.num_sequences, size.num_context_rows))
        clock.advance(overheads.chosen_row_s * size.num_chosen_rows + overheads.scored_row_s * size.num_scored_rows)
        has_drafted = bool(plan.placements) and (is_beside or not has_rested)
        unpaid_s = overheads.of_round(
            is_tuned=_is_tuned(plan),
            has_drafted=has_drafted,
            num_requests=size.num_sequences,
            num_verifying=size.num_verifying,
        )

    def on_keep(_: int) -> None:
        nonlocal unpaid_s
        clock.advance(unpaid_s)  # after the pass was timed, as the real overhead
        unpaid_s = 0.0

    return ReplayedModel(
        texts,
        "target",
        max_model_len=plan.max_model_len,
        num_tree_rows=plan.target_tree_rows,
        on_pass=on_pass,
        on_keep=on_keep,
        row_bytes=scenario.target.kv_row_bytes or 1,
        experts=costs[False].experts,
    )


def draft_model(
    scenario: Scenario, plan: Plan, texts: ReplayedTexts, clock: VirtualClock, shown: _Shown | None = None
) -> ReplayedModel:
    """Return a draft model; its passes take their own time and that of the step around them.

    Args:
        shown: shared with the target that it takes turns with; None if they run at the same time.
    """
    setups = setups_of(scenario, plan)
    setup = setups.far_draft if shown is None else setups.own_draft
    assert scenario.draft is not None and setup is not None
    overheads = scenario.draft.overheads
    shares_machine = shown is None and plan.has_drafter_process
    factor = scenario.draft_factor * (overheads.beside_factor if shares_machine else 1.0)
    cost = setup.true_cost(factor)

    def on_pass(size: PassSize) -> None:
        pass_s = cost.seconds(size.num_tokens, size.num_sequences, size.num_context_rows)
        clock.advance(pass_s + factor * (overheads.step_s + overheads.node_s * size.num_logits))
        if shown is not None and _is_tuned(plan):  # a drafter beside the target gets no such requests
            clock.advance(overheads.tuned_step_s + overheads.tuned_node_s * size.num_logits)
        if shown is not None and shown.are_targets:
            shown.are_targets, shown.are_cool = False, True
            clock.advance(overheads.cold_s - overheads.cold_later_s)
        elif shown is not None and shown.are_cool:
            shown.are_cool = False
            clock.advance(overheads.cold_later_s)

    return ReplayedModel(
        texts,
        "draft",
        max_model_len=plan.max_model_len,
        num_tree_rows=plan.draft_tree_rows,
        on_pass=on_pass,
        on_keep=lambda num_rows: clock.advance(factor * (overheads.commit_s + overheads.commit_row_s * num_rows)),
    )
