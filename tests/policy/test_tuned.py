"""The policy that tunes itself: it finds the best schedule, obeys what was set, and never changes a text."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams
from card.engine.engine import Engine
from card.engine.queue import Limits
from card.machine.threads import CoreSet
from card.policy.cost import PassCost, ScheduleCost
from card.policy.rounds import Draft, Outcome, Policy, RoundView, Schedule, Wait
from card.policy.tuned import TunedPolicy
from card.transport.link import LinkStatus
from card.transport.switch import SwitchLink
from card.tree.nodes import NO_NODES, Nodes
from card.workers.request import StepResult, Verified
from card.workers.target import TargetWorker
from tests.decoding import fake, inline, make_request, plain, run_all, toy_draft, toy_target
from tests.inside import force_schedule
from tests.unreliable_link import Faults

ALL: frozenset[Schedule] = frozenset({"beside", "turns", "off"})


def cost(first_s: float, each_s: float) -> PassCost:
    return PassCost(((1, first_s), (64, first_s + 63 * each_s)))


def costs(**changes: PassCost) -> dict[Schedule, ScheduleCost]:
    """Return the schedules of a target of 10 ms a pass and 1 ms for each further token, half of it on all cores."""
    costs = {"beside": cost(1e-2, 1e-3), "alone": cost(7e-3, 5e-4), "drafter": cost(1e-3, 5e-5)} | changes
    core_set = CoreSet()
    return {
        "beside": ScheduleCost(core_set, costs["beside"], costs["drafter"]),
        "turns": ScheduleCost(core_set, costs["alone"], costs["drafter"]),
        "off": ScheduleCost(core_set, costs["alone"]),
    }


def chain(*path_logprobs: float) -> Nodes:
    return Nodes.chain(range(len(path_logprobs)), path_logprobs)


def view(num_requests: int = 1, draft: DraftSettings | None = None, **changes) -> RoundView:
    requests = [make_request(i, draft=draft) for i in range(num_requests)]
    return RoundView(requests, num_prompt_tokens=0, num_context_rows=100, takes_turns=False, is_up=True, **changes)


@dataclass
class World:
    """A machine with its own tokens/s for each schedule. Each request verifies three candidates of the drafter's."""

    speed: dict[Schedule, float]
    agreement: float = 0.8
    seed: int = 0

    def run(
        self, policy: TunedPolicy, num_rounds: int, num_requests: int = 1, available: frozenset[Schedule] = ALL
    ) -> dict[Schedule, int]:
        """Return how many rounds ran under each schedule."""
        rng, used = random.Random(self.seed), dict.fromkeys(self.speed, 0)
        for _ in range(num_rounds):
            policy.begin(num_requests, available)
            schedule = policy.schedule
            used[schedule] += 1
            verified = []
            for idx in range(num_requests):
                agreed = [rng.random() < self.agreement for _ in range(3)]
                num_agreed = agreed.index(False) if False in agreed else 3
                compared = (0, 0) if schedule == "off" else (min(num_agreed + 1, 3), num_agreed)
                verified.append(Verified(idx, NO_NODES, (), True, *compared))
            committed = num_requests + sum(one.num_agreed for one in verified)
            seconds = committed / self.speed[schedule]
            num_tokens = num_requests * (1 if schedule == "off" else 4)
            result = StepResult(verified=verified, num_tokens=num_tokens, busy_s=0.95 * seconds)
            policy.observe(Outcome(view(num_requests), result, seconds, committed, 0, 0.0))
        return used


def test_speculation_comes_back_when_it_pays_again():
    policy = TunedPolicy(costs(), DraftSettings())
    World({"beside": 80.0, "turns": 80.0, "off": 140.0}, agreement=0.05).run(policy, 300)
    assert policy.schedule == "off"
    World({"beside": 300.0, "turns": 200.0, "off": 140.0}, agreement=0.95).run(policy, 600)
    used = World({"beside": 300.0, "turns": 200.0, "off": 140.0}, agreement=0.95).run(policy, 600)
    assert used["beside"] > 500


def test_all_cores_that_were_measured_too_slow_are_found_out_before_it_settles_beside_a_drafter():
    believed = costs(alone=cost(1.4e-2, 1e-3))
    policy = TunedPolicy(believed, DraftSettings())
    assert policy.schedule == "beside"
    assert World({"beside": 200.0, "turns": 330.0, "off": 140.0}).run(policy, 100)["turns"] > 90
    told_right = TunedPolicy(believed, DraftSettings())
    used = World({"beside": 300.0, "turns": 150.0, "off": 70.0}).run(told_right, 100)
    assert used == {"beside": 92, "turns": 8, "off": 0}


def test_where_the_target_computes_alike_under_both_schedules_there_is_nothing_to_find_out():
    policy = TunedPolicy(costs(alone=cost(1e-2, 1e-3)), DraftSettings())
    used = World({"beside": 300.0, "turns": 150.0, "off": 100.0}).run(policy, 100)
    assert used == {"beside": 100, "turns": 0, "off": 0}


def test_each_batch_size_has_its_own_best_schedule():
    policy = TunedPolicy(costs(), DraftSettings())
    alone = World({"beside": 300.0, "turns": 200.0, "off": 140.0})
    crowded = World({"beside": 800.0, "turns": 900.0, "off": 1100.0})
    for _ in range(6):
        alone.run(policy, 200, 1)
        crowded.run(policy, 200, 16)
    assert alone.run(policy, 300, 1)["beside"] >= 240
    assert crowded.run(policy, 300, 16)["off"] >= 240


def test_a_schedule_whose_drafter_is_down_is_left_at_once_and_taken_up_again():
    policy = TunedPolicy(costs(), DraftSettings())
    world = World({"beside": 300.0, "turns": 200.0, "off": 140.0})
    world.run(policy, 600)
    used = world.run(policy, 50, available=frozenset({"turns", "off"}))
    assert used["beside"] == 0
    assert world.run(policy, 600)["beside"] > 300


def test_the_only_schedule_left_is_kept_while_its_drafter_is_down():
    policy = TunedPolicy({"beside": costs()["beside"]}, DraftSettings())
    policy.begin(1, frozenset({"off"}))
    assert policy.schedule == "beside"


def test_a_bad_pair_is_predicted_to_be_off_and_a_good_one_is_not():
    policy = TunedPolicy(costs(drafter=cost(2e-2, 1e-3)), DraftSettings())
    assert policy.schedule == "off", "the drafter is slower than the target"
    assert TunedPolicy(costs(), DraftSettings()).schedule != "off"


@pytest.mark.parametrize("schedule", ["beside", "turns"])
def test_a_drafter_that_agrees_more_promises_more_and_one_that_never_does_promises_no_gain(schedule):
    policy = TunedPolicy(costs(), DraftSettings())
    speeds = [policy.predicted(schedule, agreement=one) for one in (0.0, 0.5, 0.9, 1.0)]
    assert speeds == sorted(speeds)
    assert speeds[0] <= policy.predicted("off")
    assert speeds[-1] > 2 * speeds[0]


def test_a_dear_drafter_pays_beside_the_target_before_it_pays_in_turns():
    of_two_devices = costs(drafter=cost(5e-3, 1e-5))
    of_two_devices["beside"] = replace(of_two_devices["beside"], target=cost(7e-3, 5e-4))
    policy = TunedPolicy(of_two_devices, DraftSettings())
    assert policy.predicted("beside", agreement=0.95) > policy.predicted("turns", agreement=0.95)


def test_what_others_get_accepted_speeds_every_schedule_up_and_leaves_less_to_the_drafter():
    alone, helped = (TunedPolicy(costs(), DraftSettings()) for _ in range(2))
    offer = Nodes((1, 2), (-1, 0), (-0.1, -0.2), (1, 2), (2, 2))
    others_right = StepResult(verified=[Verified(0, offer, (0, 1), True, 0, 0)])
    for _ in range(100):
        helped.observe(Outcome(view(), others_right, 0.0, 3, 0, 0.0))
    assert helped.predicted("off") > 1.5 * alone.predicted("off")
    gains = [told.predicted("turns", agreement=0.7) / told.predicted("off") for told in (alone, helped)]
    assert gains[0] > gains[1]


def test_in_turns_a_drafter_costs_only_the_rounds_in_which_others_are_wrong():
    policy = TunedPolicy(costs(drafter=cost(4e-3, 1e-6)), DraftSettings())
    offer = Nodes((1,), (-1,), (-0.1,), (1,), (2,))
    for turn in range(200):
        verified = Verified(0, offer, () if turn % 10 == 0 else (0,), True, 0, 0)
        policy.observe(Outcome(view(), StepResult(verified=[verified]), 0.0, 2, 0, 0.0))
    assert policy.predicted("turns", agreement=0.8) > 1.2 * policy.predicted("off")


def num_chosen(policy: TunedPolicy, offers: list[Nodes], draft: DraftSettings | None = None) -> int:
    """Return how many candidates are verified; they are the leading ones of each offer."""
    chosen = policy.choose(view(draft=draft), offers)
    for offer, part in zip(offers, chosen, strict=True):
        assert part.tokens == offer.tokens[: len(part)]
    return sum(len(part) for part in chosen)


def test_more_is_verified_where_tokens_cost_little_and_less_where_they_cost_much():
    offers = [chain(-0.1, -0.3, -0.6, -1.0, -1.6, -2.3)]
    cheap = TunedPolicy({"beside": costs(beside=cost(1e-2, 1e-5))["beside"]}, DraftSettings())
    dear = TunedPolicy({"beside": costs(beside=cost(1e-3, 1e-2))["beside"]}, DraftSettings())
    assert num_chosen(cheap, offers) == 6
    assert num_chosen(dear, offers) <= 1


def test_candidates_that_the_target_never_takes_are_soon_not_verified_any_more():
    policy = TunedPolicy({"beside": costs(beside=cost(1e-2, 3e-3))["beside"]}, DraftSettings())
    offer = chain(-0.05, -0.1, -0.2)
    assert num_chosen(policy, [offer]) > 0
    for _ in range(120):
        policy.begin(1, ALL)
        result = StepResult(verified=[Verified(0, offer, (), True, 1, 0)], num_tokens=4, busy_s=0.013)
        policy.observe(Outcome(view(), result, 0.0135, 1, 0, 0.0))
    assert num_chosen(policy, [offer]) == 0


def test_writers_are_asked_for_little_where_little_of_theirs_is_worth_verifying_and_for_all_where_all_is():
    policy = TunedPolicy({"beside": costs(beside=cost(1e-2, 3e-3))["beside"]}, DraftSettings())
    (request,) = view().requests
    most = request.draft.budget
    assert policy.writer_budget(request) == most
    for _ in range(most):  # the draft model's own candidates, which are verified, say nothing of the others
        assert num_chosen(policy, [msgspec.structs.replace(chain(-0.01, -6.0), writers=(1, 2))]) == 1
    assert policy.writer_budget(request) == 1
    num_chosen(policy, [msgspec.structs.replace(chain(-0.01), writers=(2,))])
    assert policy.writer_budget(request) == most, "all that they proposed was worth it: a copy may begin"
    for fewer in range(most - 1, 3, -1):
        num_chosen(policy, [msgspec.structs.replace(chain(-0.01, -0.02, -6.0), writers=(2, 3, 2))])
        assert policy.writer_budget(request) == fewer
    num_chosen(policy, [msgspec.structs.replace(chain(-0.01, -0.02, -6.0), writers=(2, 3, 2))])
    assert policy.writer_budget(request) == 4, "twice the two that were verified"


def test_in_turns_it_drafts_until_a_layer_is_not_worth_its_time():
    policy = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    policy.begin(1, ALL)
    drafted = view(best_paths=[(0, 0.0)])
    drafted.takes_turns = True
    assert policy.prepare(drafted) == Draft(1)
    drafted.best_paths, drafted.num_passes = [(5, -7.0)], 5
    assert policy.prepare(drafted) is None, "nobody believes in so unlikely a path"


def test_a_drafter_that_rests_in_turns_reads_no_prompt_ahead():
    policy = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    prompt = replace(view(0), takes_turns=True, num_prompt_tokens=8)
    policy.begin(1, ALL)
    assert policy.prepare(prompt) == Draft(1)
    assert policy.prepare(replace(prompt, num_passes=1)) is None
    for num_passes, action in ((0, None), (2, Draft(1))):
        now = replace(view(), takes_turns=True, num_passes=num_passes, waited_s=1e-3 * num_passes)
        policy.observe(Outcome(now, StepResult(num_tokens=1, busy_s=7e-3), 8e-3, 1, 0, 0.0))
        assert policy.prepare(prompt) == action


def test_in_turns_nothing_is_drafted_that_the_budget_leaves_no_room_for():
    policy = TunedPolicy({"turns": costs(drafter=cost(1e-6, 0.0))["turns"]}, DraftSettings(budget=4))
    policy.begin(1, ALL)
    for depth, action in ((3, Draft(1)), (4, None)):
        assert policy.prepare(replace(view(best_paths=[(depth, -1e-3)]), takes_turns=True, num_passes=1)) == action


def test_in_turns_it_stops_when_the_drafter_makes_nothing_deeper():
    policy = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    policy.begin(1, ALL)
    drafted = view(best_paths=[(0, 0.0)])
    drafted.takes_turns = True
    for num_passes in range(3):
        drafted.num_passes = num_passes
        action = policy.prepare(drafted)
    assert action is None


def test_a_drafter_that_is_not_asked_to_draft_is_told_nothing_and_catches_up_before_it_is():
    class Sometimes(Policy):
        def prepare(self, view):
            num_new = view.num_context_rows - 2
            return Draft(3) if num_new > 9 and view.num_passes == 0 else None

    target = toy_target(1)
    link = inline(toy_draft(target, 1.0))
    told: list[tuple[int, object]] = []
    send, draft = link.send, link.draft
    link.send = lambda message: (told.append(message), send(message))
    link.draft = lambda num_passes: (told.append("draft"), draft(num_passes))
    worker = TargetWorker(target, clock=time.perf_counter)
    policy = Sometimes("turns")
    engine = Engine(worker, link, policy=policy)
    request = make_request(0, params=SamplingParams(temperature=0.0, seed=0, max_tokens=40))
    texts = run_all(engine, {0: [request]})
    assert texts[0] == plain(toy_target(1), params=request.params, prompt=request.prompt_ids)
    kinds = ["draft" if message == "draft" else type(message).__name__ for message in told]
    assert kinds[:3] == ["Open", "Correction", "draft"], "one correction tells all that was missed"
    assert len(told[1].token_ids) > 5
    assert engine.stats().tree_nodes == 0


def test_long_prompts_are_read_on_all_cores_though_a_drafter_runs_beside():
    beside, alone = CoreSet((0,), 1), CoreSet((), 2)
    slow, fast = cost(0.1, 1e-3), cost(1e-3, 5e-5)
    places = {"beside": ScheduleCost(beside, fast, fast), "off": ScheduleCost(alone, slow)}
    policy = TunedPolicy(places, DraftSettings())
    policy.begin(1, frozenset(places))
    assert (policy.schedule, policy.cores, policy.reading_cores) == ("beside", beside, alone)
    kept = TunedPolicy({"beside": places["beside"]}, DraftSettings())
    assert kept.reading_cores == beside, "the schedule was set, and with it the cores"


class Resting:
    """A link that counts how often it is looked after."""

    runs_by_itself = True
    layers_per_pass = 1
    ready = None
    status = LinkStatus("up")

    def __init__(self) -> None:
        self.num_receives = 0

    def receive(self):
        self.num_receives += 1
        return []


def test_the_drafter_that_rests_is_looked_after_now_and_then_and_the_present_one_always():
    beside, turns, seconds = Resting(), Resting(), itertools.count(step=0.01)
    link = SwitchLink(beside, turns, clock=lambda: next(seconds))
    for _ in range(160):
        link.receive()
    assert beside.num_receives == 160
    assert 5 <= turns.num_receives <= 20


def test_it_waits_for_candidates_only_if_told_to_and_as_long_as_told():
    costly = {"beside": costs(beside=cost(0.1, 1e-3))["beside"]}
    draft = DraftSettings(max_wait_s=0.25)
    missed = view(draft=draft, best_paths=[(0, 0.0)], num_short=1)
    assert TunedPolicy(costly, draft).prepare(missed) is None
    told = TunedPolicy(costly, draft, pinned=frozenset({"max_wait_s"}))
    assert told.prepare(missed) == Wait(0.25)
    assert told.prepare(replace(missed, waited_s=0.2)) == Wait(pytest.approx(0.05))
    assert told.prepare(replace(missed, waited_s=0.25)) is None
    assert told.prepare(replace(missed, num_short=0)) is None
    assert told.prepare(replace(missed, is_up=False)) is None


def test_beams_are_as_wide_as_set_beside_the_target_and_single_paths_in_turns():
    for schedule, width in (("beside", 6), ("turns", 1)):
        assert TunedPolicy({schedule: costs()[schedule]}, DraftSettings(beam_width=6)).beam_width() == width


def test_what_was_set_is_obeyed():
    draft = DraftSettings(beam_width=5, lead=9, min_verify_prob=0.5, max_wait_s=0.25)
    pinned = frozenset({"beam_width", "lead", "min_verify_prob", "max_wait_s"})
    policy = TunedPolicy({"beside": costs()["beside"]}, draft, pinned=pinned)
    for num_requests in (1, 16):
        policy.begin(num_requests, ALL)
        assert policy.beam_width() == 5
    assert num_chosen(policy, [chain(-0.1, -0.6, -0.8)], draft) == 2
    assert policy.prepare(view(draft=draft, best_paths=[(0, 0.0)], num_short=1)) == Wait(0.25)


seconds = st.floats(1e-5, 1e-1)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    agreement=st.sampled_from([0.0, 0.8, 1.0]),
    costs=st.tuples(seconds, seconds, seconds, seconds, seconds, seconds),
    num_requests=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 1.0]),
    faults=st.builds(
        Faults,
        seed=st.integers(0, 99),
        drop=st.sampled_from([0.0, 0.3]),
        max_delay=st.integers(0, 2),
        kill=st.sampled_from([0.0, 0.1]),
    ),
    switches=st.booleans(),
)
def test_texts_are_those_of_plain_decoding_however_the_schedule_changes(
    seed, agreement, costs, num_requests, temperature, faults, switches
):
    target, draft = toy_target(seed), toy_draft(toy_target(seed), agreement)
    beside = fake(draft, faults)
    link = SwitchLink(beside, inline(draft))
    core_set = CoreSet()
    policy = TunedPolicy(
        {
            "beside": ScheduleCost(core_set, cost(*costs[:2]), cost(*costs[2:4])),
            "turns": ScheduleCost(core_set, cost(*costs[4:6]), cost(*costs[2:4])),
            "off": ScheduleCost(core_set, cost(*costs[4:6])),
        },
        DraftSettings(),
    )
    engine = Engine(
        TargetWorker(target, clock=time.perf_counter),
        link,
        limits=Limits(prefill_chunk=4),
        policy=Restless(policy, seed) if switches else policy,
    )
    requests = [
        make_request(
            i,
            prompt=tuple((i + j) % 12 for j in range(5 + i)),
            params=SamplingParams(temperature=temperature, seed=i, max_tokens=30),
        )
        for i in range(num_requests)
    ]
    texts = run_all(engine, {2 * i: [request] for i, request in enumerate(requests)})
    assert texts == {r.request_id: plain(toy_target(seed), params=r.params, prompt=r.prompt_ids) for r in requests}
    assert not link.status.reason, "no message of an honest drafter is rejected"
    assert engine.stats().kv_open_sequences == 0


class Restless:
    """A policy that changes its schedule at random."""

    def __init__(self, policy: TunedPolicy, seed: int) -> None:
        self._policy = policy
        self._rng = random.Random(seed)

    def __getattr__(self, name: str):
        return getattr(self._policy, name)

    def begin(self, num_decoding: int, available: frozenset[Schedule]) -> None:
        self._policy.begin(num_decoding, available)
        if self._rng.random() < 0.3:
            force_schedule(self._policy, self._rng.choice(sorted(available)))


def test_in_turns_nothing_is_drafted_that_other_writers_have_as_surely():
    policy = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    fresh = replace(view(), takes_turns=True, best_paths=[(0, 0.0)])
    assert policy.prepare(fresh) == Draft(1)
    sure = msgspec.structs.replace(chain(*[-0.001 * i for i in range(1, 13)]), writers=(2,) * 12)
    for _ in range(60):
        verified = [Verified(0, sure, tuple(range(12)), True, 0, 0)]
        policy.observe(Outcome(replace(view(), num_passes=1), StepResult(verified=verified), 0.05, 5, 1, 0.0))
    assert policy.prepare(replace(fresh, undrafted=[sure])) is None
    unsure = msgspec.structs.replace(sure, path_logprobs=tuple(-2.0 * i for i in range(1, 13)))
    assert policy.prepare(replace(fresh, undrafted=[unsure])) == Draft(1)


def in_turns(drafter_s: float, token_s: float, *, num_compared: int, num_agreed: int) -> TunedPolicy:
    """Return a policy in turns that saw so many of the drafter's candidates agree in each verification."""
    policy = TunedPolicy(
        {"turns": ScheduleCost(CoreSet(), cost(7e-3, token_s), cost(drafter_s, 5e-5))}, DraftSettings()
    )
    verified = [Verified(0, NO_NODES, (), True, num_compared, num_agreed)]
    for _ in range(100):
        policy.observe(Outcome(view(0), StepResult(verified=verified), 0.01, 2, 0, 0.0))
    policy.begin(1, frozenset({"turns"}))
    return policy


def test_in_turns_a_drafter_that_agrees_is_let_draft_and_one_that_does_not_is_not():
    fresh = replace(view(), takes_turns=True, best_paths=[(0, 0.0)])
    assert in_turns(3e-3, 5e-4, num_compared=5, num_agreed=5).prepare(fresh) == Draft(1)
    assert in_turns(5e-3, 5e-4, num_compared=4, num_agreed=1).prepare(fresh) is None


def test_the_engine_asks_local_writers_for_as_much_as_the_policy_says():
    asked: list[int] = []

    class Wrong:
        def propose(self, best_path, budget):
            asked.append(budget)
            return Nodes.chain((3,), (-9.0,))

        def observe(self, seen):
            pass

        def close(self):
            pass

    policy = TunedPolicy({"off": costs()["off"]}, DraftSettings())
    target = toy_target(1)
    worker = TargetWorker(target, clock=time.perf_counter, writers={"wrong": lambda request: Wrong()})
    engine = Engine(worker, None, policy=policy)
    request = make_request(0, params=SamplingParams(temperature=0.0, seed=0, max_tokens=30))
    assert run_all(engine, {0: [request]})[0] == plain(toy_target(1), params=request.params, prompt=request.prompt_ids)
    assert asked[0] == request.draft.budget
    assert asked[-1] == 1


@pytest.mark.parametrize("schedule", ["turns", "beside"])
def test_the_engine_shows_what_the_writers_have_where_nothing_is_drafted(schedule):
    class Repeats:
        def propose(self, best_path, budget):
            return Nodes.chain((3, 4), (-0.1, -0.2))

        def observe(self, seen):
            pass

        def close(self):
            pass

    seen: list[RoundView] = []
    policy = TunedPolicy({schedule: costs()[schedule]}, DraftSettings())
    prepare = policy.prepare
    policy.prepare = lambda view: (seen.append(view), prepare(view))[1]
    target = toy_target(1)
    worker = TargetWorker(target, clock=time.perf_counter, writers={"repeats": lambda request: Repeats()})
    link = fake(toy_draft(target, 0.8))
    link.runs_by_itself = schedule == "beside"
    engine = Engine(worker, link, policy=policy)
    request = make_request(0, params=SamplingParams(temperature=0.0, seed=0, max_tokens=6))
    texts = run_all(engine, {0: [request]})
    assert texts[0] == plain(toy_target(1), params=request.params, prompt=request.prompt_ids)
    assert all(v.takes_turns == (schedule == "turns") for v in seen)
    assert next(offer.tokens for v in seen for offer in v.undrafted) == (3, 4)


def test_the_engine_tells_the_first_draft_pass_of_a_turn_from_all_of_them():
    outcomes: list[Outcome] = []
    policy = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    policy.prepare = lambda view: Draft(1) if view.num_passes < 1 + len(outcomes) % 3 else None
    policy.observe = outcomes.append
    target = toy_target(1)
    link = fake(toy_draft(target, 0.8))
    link.runs_by_itself = False
    seconds = itertools.count()
    engine = Engine(
        TargetWorker(target, clock=time.perf_counter), link, policy=policy, clock=lambda: float(next(seconds))
    )
    run_all(engine, {0: [make_request(0, params=SamplingParams(temperature=0.0, seed=0, max_tokens=30))]})
    views = [one.view for one in outcomes if one.view.requests]
    assert {view.num_passes for view in views} == {1, 2, 3}
    assert all(view.first_pass_s == view.waited_s > 0 for view in views if view.num_passes == 1)
    assert all(view.num_passes * view.first_pass_s == view.waited_s for view in views), "all take as long here"


def test_nothing_is_drafted_on_behalf_of_requests_that_want_no_speculation():
    params = SamplingParams(temperature=0.0, seed=0, speculates=False)
    requests = [make_request(i, params=params) for i in range(2)]
    turns = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    turns.begin(2, frozenset({"turns"}))
    best_paths = [(0, 0.0), (0, 0.0)]
    alone = replace(view(best_paths=best_paths), requests=requests, takes_turns=True)
    assert turns.prepare(alone) is None
    many = [make_request(0), *(make_request(i, params=params) for i in range(1, 6))]
    among = replace(view(6, best_paths=[(0, 0.0)] * 6), requests=many, takes_turns=True)
    crowd = TunedPolicy({"turns": ScheduleCost(CoreSet(), cost(7e-3, 1e-4), cost(1e-4, 0.0))}, DraftSettings())
    crowd.begin(6, frozenset({"turns"}))
    assert crowd.prepare(among) == Draft(1), "they are not charged for layers that they do not get"
