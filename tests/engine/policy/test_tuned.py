"""The policy that tunes itself: it finds the best schedule, obeys what was set, and never changes a text."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import DraftSettings, SamplingParams, Schedule
from card.drafting.drafter_pass import TurnEnd
from card.engine.engine import Engine
from card.engine.metrics import RequestStats
from card.engine.policy.cost import REQUEST_S
from card.engine.policy.modes import REVIEW_ROUNDS
from card.engine.policy.rounds import Draft, Outcome, RoundView, ScheduleCost, Wait
from card.engine.policy.tuned import TunedPolicy
from card.engine.queue import Limits
from card.engine.request import StepResult, Update, Verified
from card.engine.target import TargetWorker
from card.links.switch import SwitchLink
from card.machine.expert_cost import ExpertCounts, ExpertUse
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from card.tree.nodes import NO_NODES, Nodes
from tests.decoding import fake, inline, make_request, plain, run_all, toy_draft, toy_target
from tests.examples import settings
from tests.reaching_in import force_schedule
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


def in_turns(**changes: PassCost) -> dict[Schedule, ScheduleCost]:
    """Return the same without a drafter beside the target."""
    return {schedule: cost for schedule, cost in costs(**changes).items() if schedule != "beside"}


def chain(*path_logprobs: float) -> Nodes:
    return Nodes.chain(range(len(path_logprobs)), path_logprobs)


def view(num_requests: int = 1, draft: DraftSettings | None = None, **changes) -> RoundView:
    requests = [make_request(i, draft=draft) for i in range(num_requests)]
    given = RoundView(requests, num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
    return replace(given, **changes)


@dataclass
class World:
    """A machine with a clock of its own, on which passes take what is said here, whatever a policy believes."""

    real: dict[Schedule, ScheduleCost] = field(default_factory=costs)
    agreement: float = 0.8
    claimed: float | None = None  # what the drafter says of that; None: the truth
    seed: int = 0
    python_s: float = 3e-4  # around a round

    def run(
        self, policy: TunedPolicy, num_rounds: int, num_requests: int = 1, available: frozenset[Schedule] = ALL
    ) -> Counter[Schedule]:
        """Return how many rounds ran under each schedule."""
        rng, used = random.Random(self.seed), Counter[Schedule]()
        for _ in range(num_rounds):
            policy.begin(num_requests, available)
            used[policy.schedule] += 1
            self.round(policy, view(num_requests, takes_turns=policy.schedule == "turns"), rng)
        return used

    def round(self, policy: TunedPolicy, now: RoundView, rng: random.Random) -> None:
        schedule, num_requests, depths = policy.schedule, len(now.requests), [0] * len(now.requests)
        if schedule == "turns" and isinstance(order := policy.prepare(now), Draft):
            passes = self._turn(order, depths)
            now = replace(now, has_drafted=True, passes=passes, waited_s=sum(seconds for _, seconds in passes))
        elif schedule == "beside":
            depths = [3] * num_requests
        drafted = [chain(*[i * self._claimed_logprob for i in range(1, depth + 1)]) for depth in depths]
        chosen = policy.choose(now, drafted) if any(drafted) else drafted
        verified = [self._verify(idx, *both, rng) for idx, both in enumerate(zip(drafted, chosen, strict=True))]
        num_rows = num_requests + sum(map(len, chosen))
        num_committed = num_requests + sum(len(one.accepted) for one in verified)
        busy_s = self.real[schedule].target.seconds(num_rows, num_requests)
        result = StepResult(verified=verified, num_tokens=num_rows, busy_s=busy_s)
        policy.observe(Outcome(now, result, busy_s + now.waited_s + self.python_s, num_committed, 0, 0.0))

    def _turn(self, order: Draft, depths: list[int]) -> list[tuple[int, float]]:
        """Draft as a worker does. Returns: the passes; makes the depths those of the drafted paths."""
        passes: list[tuple[int, float]] = []
        while len(passes) < order.num_passes:
            spare = {i: order.end.spare(depth, depth * self._claimed_logprob) for i, depth in enumerate(depths)}
            drafted = [i for i, chance in spare.items() if chance >= 0.0 and i not in order.end.resting]
            if not drafted or sum(spare[i] for i in drafted) < order.end.layer:
                break
            for i in drafted:
                depths[i] += 1
            passes.append((len(drafted), self.real["turns"].drafter.seconds(len(drafted), len(drafted)) + 1e-4))
        return passes

    def _verify(self, idx: int, drafted: Nodes, chosen: Nodes, rng: random.Random) -> Verified:
        agreed = next((i for i in range(len(drafted)) if rng.random() >= self.agreement), len(drafted))
        num_compared = min(agreed + 1, len(drafted))
        accepted = tuple(range(min(agreed, len(chosen))))
        return Verified(idx, chosen, accepted, True, agreed, (math.exp(self._claimed_logprob),) * num_compared)

    @property
    def _claimed_logprob(self) -> float:
        return math.log(self.agreement if self.claimed is None else self.claimed)


# ---- the schedule ---------------------------------------------------------------------------------------------------


def test_drafting_that_does_not_pay_is_left_and_comes_back_when_it_pays_again():
    policy = TunedPolicy(in_turns(), DraftSettings())
    World(agreement=0.1).run(policy, 100)
    assert World(agreement=0.1).run(policy, 400)["off"] > 340
    World(agreement=0.95).run(policy, 300)
    assert World(agreement=0.95).run(policy, 200)["turns"] > 160


def test_the_schedule_that_passes_turn_out_to_make_fastest_is_found_whatever_was_measured_at_start():
    slow_beside, fast_beside = costs(beside=cost(1.5e-2, 1e-3)), costs(beside=cost(6e-3, 1e-4))
    for real, best in ((slow_beside, "turns"), (fast_beside, "beside")):
        for believed in (slow_beside, fast_beside):
            policy, world = TunedPolicy(believed, DraftSettings()), World(real)
            world.run(policy, 1500)
            assert world.run(policy, 200)[best] > 150


@pytest.mark.parametrize("times", [2.0, 4.0])
def test_costs_that_were_measured_too_dear_at_start_do_not_keep_drafting_off_for_good(times):
    drafter_s = 5e-3 * times
    policy = TunedPolicy(in_turns(drafter=cost(drafter_s, 5e-5)), DraftSettings())
    assert policy.schedule == "off"
    world = World(in_turns(drafter=cost(1e-3, 5e-5)), agreement=0.9)
    world.run(policy, 1000)
    assert world.run(policy, 200)["turns"] > 150


def test_a_drafter_measured_too_cheap_is_left_as_soon_as_rounds_show_what_it_takes():
    policy = TunedPolicy(in_turns(), DraftSettings())
    assert policy.schedule == "turns"
    world = World(in_turns(drafter=cost(2e-2, 5e-5)))
    world.run(policy, 40)
    assert world.run(policy, 400)["off"] > 340


def test_a_schedule_whose_drafter_is_down_is_left_at_once_and_taken_up_again():
    policy, world = TunedPolicy(in_turns(), DraftSettings()), World()
    world.run(policy, 200)
    assert world.run(policy, 50, available=frozenset({"off"})) == {"off": 50}
    world.run(policy, 100)
    assert world.run(policy, 100)["turns"] > 80


def test_a_bad_pair_is_predicted_to_be_off_and_a_good_one_is_not():
    policy = TunedPolicy(costs(drafter=cost(2e-2, 1e-3)), DraftSettings())
    assert policy.schedule == "off", "the drafter is slower than the target"
    assert TunedPolicy(costs(), DraftSettings()).schedule != "off"


def long_view(length: int, num_requests: int = 1) -> RoundView:
    """Return a round in turns of requests whose prompts have so many tokens."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=500)
    requests = [make_request(i, prompt=(1,) * length, params=params) for i in range(num_requests)]
    return replace(view(takes_turns=True), requests=requests)


def orders_for(policy: TunedPolicy, now: RoundView, num_rounds: int) -> list[Draft | None]:
    """Return what the policy orders in rounds whose drafter does as it is told and is always right."""
    orders = []
    for _ in range(num_rounds):
        policy.begin(len(now.requests), ALL)
        order = policy.prepare(now) if policy.schedule == "turns" else None
        orders.append(order)
        reads = order is not None and order.end.max_tokens is not None
        passes = [] if order is None else [(0 if reads else len(now.requests), 2e-3)]
        verified = [Verified(i, NO_NODES, (), True, 2, (0.9, 0.9)) for i in range(len(now.requests))]
        num_tokens = len(now.requests) * (1 if reads or order is None else 3)
        shown = replace(now, has_drafted=bool(passes), passes=passes, waited_s=sum(taken for _, taken in passes))
        policy.observe(
            Outcome(shown, StepResult(verified=verified, num_tokens=2, busy_s=8e-3), 1e-2, num_tokens, 0, 0.0)
        )
    return orders


def test_a_long_text_is_read_in_pieces_that_take_two_plain_rounds_and_then_drafted():
    policy = TunedPolicy(in_turns(), DraftSettings())
    orders = orders_for(policy, long_view(5_000), 40)
    pieces = [order.end.max_tokens for order in orders if order is not None and order.end.max_tokens is not None]
    drafter, plain_s = in_turns()["turns"].drafter, policy.round_of("off")[1]
    assert 1000 <= sum(pieces) < 1600, "the beginning and the end of it"
    assert all(drafter.seconds(piece - 1) <= 2 * plain_s for piece in pieces)
    assert orders[len(pieces)] is not None and orders[len(pieces)].end.max_tokens is None, "it drafts as soon as it can"


def test_it_says_why_a_request_gets_no_drafts():
    policy = TunedPolicy(in_turns(), DraftSettings())
    policy.begin(2, ALL)
    long, short = long_view(5_000).requests[0], make_request(1)
    (order,) = orders_for(policy, replace(long_view(5_000, 2), requests=[long, short]), 1)
    assert order is not None and policy.undrafted == {0: "reads"}
    two = long_view(5_000, 2)
    orders_for(policy, two, 1)
    assert policy.undrafted == {0: "reads", 1: "waits"}
    ending = [replace(one, params=one.params.replace(max_tokens=2)) for one in two.requests]
    orders_for(policy, replace(two, requests=ending), 1)
    assert policy.undrafted == {0: "costly", 1: "costly"}


def test_a_text_is_not_read_for_an_answer_that_is_about_to_end():
    policy = TunedPolicy(in_turns(drafter=cost(1e-3, 3e-4)), DraftSettings())
    now = long_view(900)
    short = [replace(one, params=one.params.replace(max_tokens=20)) for one in now.requests]
    assert orders_for(policy, replace(now, requests=short), 8) == [None] * 8
    assert any(orders_for(TunedPolicy(in_turns(drafter=cost(1e-3, 3e-4)), DraftSettings()), now, 8))


def test_short_texts_are_read_in_the_pass_that_drafts_for_them():
    policy = TunedPolicy(in_turns(), DraftSettings())
    (order,) = orders_for(policy, long_view(20, 4), 1)
    assert order is not None and order.end.max_tokens is None and not order.end.resting


def test_a_round_behind_one_of_a_long_text_is_priced_by_its_own_texts():
    dear = replace(cost(7e-3, 5e-4), per_context_row_s=1e-6)
    policy = TunedPolicy({"off": ScheduleCost(CoreSet(), dear)}, DraftSettings())
    policy.begin(1, ALL)
    before = policy.round_of("off")[1]
    for num_rows, expected in ((11_000, before + 11e-3), (0, before)):
        policy.prepare(view(num_context_rows=num_rows))
        assert policy.round_of("off")[1] == pytest.approx(expected)


def test_rounds_that_read_prompts_say_nothing_of_the_time_around_others():
    policy, fresh = TunedPolicy(in_turns(), DraftSettings()), TunedPolicy(in_turns(), DraftSettings())
    for _ in range(20):
        policy.begin(1, frozenset({"off"}))
        result = StepResult(num_tokens=65, busy_s=0.04)
        policy.observe(Outcome(view(num_prompt_tokens=64), result, 0.05, 1, 0, 0.0))
    assert policy.predicted("off") == pytest.approx(fresh.predicted("off"))


def copying(num_right: int) -> Verified:
    """Return a round of a text in which another writer had so many tokens right, and nothing else was verified."""
    offer = msgspec.structs.replace(chain(*[-0.1] * num_right), writers=(2,) * num_right) if num_right else NO_NODES
    return Verified(0, offer, tuple(range(num_right)), True)


def test_a_text_that_writers_copy_in_bursts_is_worth_the_mean_of_all_its_plain_rounds():
    policy = TunedPolicy({"off": costs()["off"]}, DraftSettings())
    expected = []
    for idx in range(400):
        policy.begin(1, ALL)
        num_right = 12 if idx % 4 == 0 else 0
        result = StepResult(verified=[copying(num_right)], num_tokens=1 + num_right, busy_s=7e-3)
        policy.observe(Outcome(view(), result, 7.3e-3, 1 + num_right, 0, 0.0))
        expected.append(policy.round_of("off")[0])
    assert sum(expected[200:]) / 200 == pytest.approx(4.0, rel=0.15), "rounds without candidates count as well"


@pytest.mark.parametrize("are_right", [True, False], ids=["right", "false"])
@pytest.mark.parametrize(
    ("target", "num_copying"),
    [(PassCost(((1, 2e-2), (16, 2e-2), (17, 4e-2), (32, 4e-2))), 1), (cost(1e-4, 0.0), 16)],
    ids=["passes with a step", "Python"],
)
def test_rounds_with_copies_are_dearer_and_the_others_are_not(target: PassCost, num_copying: int, are_right: bool):
    policy, expected, took = TunedPolicy({"off": ScheduleCost(CoreSet(), target)}, DraftSettings()), [], []
    for idx in range(400):
        policy.begin(16, ALL)
        num_offered = num_copying if idx % 8 == 0 else 0
        seen = [copying(4 if i < num_offered else 0) for i in range(16)]
        verified = [replace(one, request_id=i) for i, one in enumerate(seen)]
        if not are_right:
            verified = [replace(one, accepted=()) for one in verified]
        num_rows = 16 + 4 * num_offered
        result = StepResult(verified=verified, num_tokens=num_rows, busy_s=target.seconds(num_rows))
        took.append(result.busy_s + 7e-4 + num_offered * REQUEST_S)
        policy.observe(Outcome(view(16), result, took[-1], num_rows, 0, 0.0))
        expected.append(policy.round_of("off", 16)[1])
    assert sum(expected[200:]) == pytest.approx(sum(took[200:]), rel=0.04)


def test_fewer_candidates_are_verified_behind_a_long_text_once_its_prompt_was_read():
    policy, context = TunedPolicy({"off": costs()["off"]}, DraftSettings()), 10_000
    policy.begin(1, ALL)
    offer = msgspec.structs.replace(chain(*[-0.1 * i for i in range(1, 9)]), writers=(2,) * 8)
    now = view(num_context_rows=context)
    (before,) = policy.choose(now, [offer])
    for num_rows in range(0, context, 500):
        read = view(requests=[], num_prompt_tokens=500, num_prompt_pairs=500 * num_rows)
        took_s = 0.3 + 500 * num_rows * 5e-7
        policy.observe(Outcome(read, StepResult(num_tokens=500, busy_s=took_s), took_s, 0, 0, 0.0))
    (after,) = policy.choose(now, [offer])
    assert len(after) < len(before) == 8


def test_what_one_text_copied_says_nothing_of_the_next():
    policy = TunedPolicy(in_turns(), DraftSettings())
    ended = Update(0, (1,), "stop", RequestStats())
    before = policy.round_of("off")[0]
    for updates in ([], [ended]):
        result = StepResult(updates=updates, verified=[copying(6)], num_tokens=7, busy_s=7e-3)
        for _ in range(1 if updates else 30):
            policy.observe(Outcome(view(), result, 7.3e-3, 7, 0, 0.0))
        expected = before if updates else pytest.approx(7, rel=0.1)
        assert policy.round_of("off")[0] == expected


def test_plain_decoding_is_never_tried_where_drafts_are_better():
    policy = TunedPolicy(in_turns(), DraftSettings())
    assert set(World().run(policy, 1000)) == {"turns"}


def on_trial() -> TunedPolicy:
    """Return a policy that plain decoding served better, in the first round of a trial of a drafter."""
    policy = TunedPolicy(in_turns(), DraftSettings())
    World(agreement=0.1).run(policy, 500)
    for schedule in ("turns", "off"):  # to the end of a trial that runs already, and to the beginning of the next
        policy.begin(1, ALL)
        while policy.schedule == schedule:
            World(agreement=0.1).run(policy, 1)
            policy.begin(1, ALL)
    return policy


def see_turn(policy: TunedPolicy, num_tokens: int, *passes: tuple[int, float]) -> Schedule:
    """Show a turn of one request, in which nothing of the drafter's was compared. Returns: the next schedule."""
    now = view(takes_turns=True, has_drafted=bool(passes), passes=passes, waited_s=sum(taken for _, taken in passes))
    result = StepResult(verified=[Verified(0, NO_NODES, (), True)], num_tokens=num_tokens, busy_s=8e-3)
    policy.observe(Outcome(now, result, 8e-3 + now.waited_s, num_tokens, 0, 0.0))
    policy.begin(1, ALL)
    return policy.schedule


def test_a_trial_lasts_until_a_drafter_has_read_the_text_and_shows_something():
    policy = on_trial()
    now = long_view(3_000)
    for _ in range(3):
        order = policy.prepare(now)
        assert isinstance(order, Draft) and order.end.max_tokens is not None
        assert see_turn(policy, 1, (0, 0.05)) == "turns", "it has only read so far"
    schedules = []
    for _ in range(REVIEW_ROUNDS):
        policy.prepare(view(takes_turns=True))
        schedules.append(see_turn(policy, 1, (1, 1.2e-3)))
    assert schedules == ["turns"] * (REVIEW_ROUNDS - 1) + ["off"], "it drafted, and nothing of that was right"


def test_one_request_among_many_is_not_drafted_for_where_a_plain_round_brings_more():
    policy = TunedPolicy(in_turns(alone=cost(7e-3, 2e-4)), DraftSettings())
    crowd = view(16, takes_turns=True)
    policy.begin(16, ALL)
    force_schedule(policy, "turns")
    among = [crowd.requests[0], *[replace(one, uses_drafter=False) for one in crowd.requests[1:]]]
    assert policy.prepare(replace(crowd, requests=among)) is None
    assert policy.undrafted == {0: "costly"}
    assert isinstance(policy.prepare(crowd), Draft), "all share what a layer costs"


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


def test_a_drafter_slower_than_the_target_promises_no_gain_beside_it_however_right_it_is():
    policy = TunedPolicy(costs(drafter=cost(1.5e-2, 0.0)), DraftSettings())
    plain_beside = 1 / costs()["beside"].target.seconds(1)
    assert policy.predicted("beside", agreement=0.9) <= plain_beside


def test_long_prompts_are_read_on_all_cores_though_a_drafter_runs_beside():
    beside, alone = CoreSet((0,), 1), CoreSet((), 2)
    slow, fast = cost(0.1, 1e-3), cost(1e-3, 5e-5)
    places = {"beside": ScheduleCost(beside, fast, fast), "off": ScheduleCost(alone, slow)}
    policy = TunedPolicy(places, DraftSettings())
    policy.begin(1, frozenset(places))
    assert (policy.schedule, policy.cores, policy.reading_cores) == ("beside", beside, alone)
    kept = TunedPolicy({"beside": places["beside"]}, DraftSettings())
    assert kept.reading_cores == beside, "the schedule was set, and with it the cores"


# ---- what is verified -----------------------------------------------------------------------------------------------


def num_chosen(policy: TunedPolicy, offers: list[Nodes], draft: DraftSettings | None = None) -> int:
    """Return how many candidates are verified; they are the leading ones of each offer."""
    chosen = policy.choose(view(draft=draft, takes_turns=policy.schedule == "turns"), offers)
    for offer, part in zip(offers, chosen, strict=True):
        assert part.tokens == offer.tokens[: len(part)]
    return sum(len(part) for part in chosen)


@pytest.mark.parametrize("schedule", ["beside", "turns"])
def test_more_is_verified_where_tokens_cost_little_and_less_where_they_cost_much(schedule):
    offers = [chain(-0.1, -0.3, -0.6, -1.0, -1.6, -2.3)]
    cheap, dear = (
        TunedPolicy({schedule: costs(beside=target, alone=target)[schedule]}, DraftSettings())
        for target in (cost(1e-2, 1e-5), cost(1e-3, 1e-2))
    )
    assert num_chosen(cheap, offers) == 6
    assert num_chosen(dear, offers) <= 1


@pytest.mark.parametrize("schedule", ["beside", "turns"])
def test_a_candidate_is_worth_its_experts_beside_other_requests_sooner_than_alone(schedule):
    counts = ExpertCounts(num_experts=64, per_row=8)
    use = ExpertUse(counts)
    target = PassCost(tuple((n, 4e-3 + 7.5e-4 * use.expected(n)) for n in (1, 2, 4, 8, 16, 32)), experts=counts)
    places = costs(beside=target, alone=target, drafter=cost(2e-4, 1e-5))
    taken = {}
    for num_requests in (1, 16):
        policy = TunedPolicy({schedule: places[schedule], "off": places["off"]}, DraftSettings())
        policy.begin(num_requests, ALL)
        now = view(num_requests, takes_turns=schedule == "turns")
        taken[num_requests] = [
            sum(map(len, policy.choose(now, [chain(logprob)] * num_requests))) / num_requests
            for logprob in (-0.1, -0.9, -3.0)
        ]
    assert taken == {1: [1, 0, 0], 16: [1, 1, 0]}


@pytest.mark.parametrize("schedule", ["beside", "turns"])
def test_candidates_that_the_target_never_takes_are_soon_not_verified_any_more(schedule):
    target = cost(1e-2, 3e-3)
    policy = TunedPolicy({schedule: costs(beside=target, alone=target)[schedule]}, DraftSettings())
    offer = chain(-0.05, -0.1, -0.2)
    assert num_chosen(policy, [offer]) > 0
    for _ in range(120):
        policy.begin(1, ALL)
        result = StepResult(verified=[Verified(0, offer, (), True, 0, (0.95,))], num_tokens=4, busy_s=0.013)
        policy.observe(Outcome(view(), result, 0.0135, 1, 0, 0.0))
    assert num_chosen(policy, [offer]) == 0


def test_writers_are_asked_for_little_where_nothing_of_theirs_is_taken_and_for_all_where_something_is():
    policy = TunedPolicy({"beside": costs()["beside"]}, DraftSettings())
    (request,), offer = view().requests, msgspec.structs.replace(chain(-0.01, -0.02), writers=(2, 2))

    def budgets(accepted: tuple[int, ...], num_rounds: int) -> list[int]:
        found = []
        for _ in range(num_rounds):
            policy.begin(1, ALL)
            found.append(policy.writer_budget(request))
            verified = [Verified(0, offer, accepted, True)]
            result = StepResult(verified=verified, num_tokens=3, busy_s=0.001)  # in long rounds questions cost nothing
            policy.observe(Outcome(view(), result, 0.0012, 1, 0, 0.0))
        return found

    most = request.draft.budget
    assert budgets((), 1) == [most]
    assert 0 < sum(budgets((), 20)) < 20 * most / 4
    budgets((0,), 40)
    assert budgets((0,), 10) == [most] * 10


# ---- turns ----------------------------------------------------------------------------------------------------------


def order_of(policy: TunedPolicy, now: RoundView | None = None) -> Draft:
    """Return the order for a turn of a request that nothing else is offered for."""
    order = policy.prepare(now or view(takes_turns=True))
    assert isinstance(order, Draft)
    return order


def least_chance(end: TurnEnd) -> float:
    """Return the chance below which a single request is not drafted for any further, from the second layer on."""
    return end.floors[1] + end.layer


def of_turns(drafter: PassCost, draft: DraftSettings | None = None, alone: PassCost | None = None) -> TunedPolicy:
    """Return a policy that always takes turns with such a drafter."""
    target = costs()["turns"].target if alone is None else alone
    policy = TunedPolicy({"turns": ScheduleCost(CoreSet(), target, drafter)}, draft or DraftSettings())
    policy.begin(1, frozenset({"turns"}))
    return policy


def test_a_turn_ends_sooner_the_dearer_the_drafter_is():
    ends = [least_chance(order_of(of_turns(cost(seconds, 0.0))).end) for seconds in (1e-4, 3e-3, 4e-3, 5e-3)]
    assert ends == sorted(ends)
    assert 0.0 < ends[0] < ends[-1]


def test_a_turn_ends_sooner_the_dearer_rows_are():
    ends = [least_chance(order_of(of_turns(cost(1e-3, 0.0), alone=cost(7e-3, row_s))).end) for row_s in (0.0, 5e-3)]
    assert ends[0] < ends[1]


def test_a_turn_is_told_how_far_the_claims_of_the_draft_model_can_be_trusted():
    for claimed, is_below in ((0.95, True), (0.6, False)):
        policy = of_turns(cost(1e-3, 0.0))
        World({"turns": costs()["turns"]}, agreement=0.6, claimed=claimed).run(policy, 200)
        calibration = order_of(policy).end.calibration
        assert (calibration.chance(1, math.log(claimed)) < 0.85 * claimed) == is_below


def test_a_turn_makes_no_more_layers_than_the_budget_has_room_for():
    for budget, layers_per_pass, most in ((4, 1, 4), (1, 1, 1), (6, 4, 2)):
        policy = of_turns(cost(1e-6, 0.0), DraftSettings(budget=budget))
        assert order_of(policy, view(takes_turns=True, layers_per_pass=layers_per_pass)).num_passes == most


def test_a_drafter_in_turns_reads_nothing_while_nobody_decodes():
    policy = of_turns(cost(1e-3, 0.0))
    assert policy.prepare(view(0, takes_turns=True, num_prompt_tokens=8)) is None
    assert policy.prepare(view(0, takes_turns=True)) is None


def test_in_turns_nothing_is_drafted_that_other_writers_have_as_surely():
    policy = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    sure = msgspec.structs.replace(chain(*[-0.001 * i for i in range(1, 13)]), writers=(2,) * 12)
    policy.begin(1, ALL)
    for _ in range(60):
        result = StepResult(verified=[Verified(0, sure, tuple(range(12)), True)], num_tokens=13, busy_s=0.014)
        policy.observe(Outcome(view(takes_turns=True), result, 0.015, 13, 0, 0.0))
    assert policy.prepare(view(takes_turns=True, undrafted=[sure])) is None
    assert order_of(policy, view(takes_turns=True, undrafted=[NO_NODES])).end.resting == frozenset()
    both = view(2, takes_turns=True, undrafted=[sure, NO_NODES])
    assert order_of(policy, both).end.resting == {0}, "the other one is drafted for"
    assert policy.undrafted == {0: "copied"}
    unsure = msgspec.structs.replace(sure, path_logprobs=tuple(-2.0 * i for i in range(1, 13)))
    assert order_of(policy, view(takes_turns=True, undrafted=[unsure])).end.resting == frozenset()


@pytest.mark.parametrize(("drafter_s", "resting"), [(1e-4, set()), (12e-3, {0})], ids=["cheap", "dear"])
def test_behind_a_copy_it_drafts_on_where_later_layers_pay_for_those_that_bring_nothing(drafter_s, resting):
    policy = of_turns(cost(drafter_s, 0.0))
    policy.recall(0.95)
    policy.begin(2, ALL)
    short = msgspec.structs.replace(chain(-0.001, -0.002, -0.003), writers=(2,) * 3)
    assert order_of(policy, view(2, takes_turns=True, undrafted=[short, NO_NODES])).end.resting == resting


def test_nothing_is_drafted_on_behalf_of_requests_that_want_no_speculation():
    params = SamplingParams(temperature=0.0, seed=0, speculates=False)
    unwilling = [make_request(i, params=params) for i in range(1, 6)]
    policy = of_turns(cost(1e-3, 1e-3))
    assert policy.prepare(view(takes_turns=True, requests=unwilling)) is None
    policy.begin(6, frozenset({"turns"}))
    among = order_of(policy, view(takes_turns=True, requests=[make_request(0), *unwilling])).end
    crowd = order_of(policy, view(6, takes_turns=True)).end
    assert among.floors[1] <= 1.001 * crowd.floors[1], "they are not charged for layers that they do not get"


# ---- what was set ---------------------------------------------------------------------------------------------------


def test_it_waits_for_candidates_only_if_told_to_and_as_long_as_told():
    costly = {"beside": costs(beside=cost(0.1, 1e-3))["beside"]}
    draft = DraftSettings(max_wait_s=0.25)
    missed = view(draft=draft, num_short=1)
    assert TunedPolicy(costly, draft).prepare(missed) is None
    told = TunedPolicy(costly, draft, pinned=frozenset({"max_wait_s"}))
    assert told.prepare(missed) == Wait(0.25)
    assert told.prepare(replace(missed, waited_s=0.2)) == Wait(pytest.approx(0.05))
    assert told.prepare(replace(missed, waited_s=0.25)) is None
    assert told.prepare(replace(missed, num_short=0)) is None


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
    assert policy.prepare(view(draft=draft, num_short=1)) == Wait(0.25)
    assert TunedPolicy({"turns": costs()["turns"]}, draft, pinned=pinned).beam_width() == 5


# ---- with an engine -------------------------------------------------------------------------------------------------


seconds = st.floats(1e-5, 1e-1)


@settings(max_examples=30)
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
    looks = itertools.count()

    def clock() -> float:  # by which a round takes a millisecond or two, however busy the machine is
        return 2e-4 * next(looks)

    worker = TargetWorker(target, clock=clock, writers={"wrong": lambda request: Wrong()})
    engine = Engine(worker, None, policy=policy, clock=clock)
    request = make_request(0, params=SamplingParams(temperature=0.0, seed=0, max_tokens=30))
    assert run_all(engine, {0: [request]})[0] == plain(toy_target(1), params=request.params, prompt=request.prompt_ids)
    assert asked[0] == request.draft.budget
    assert asked[-1] < request.draft.budget
    assert len(asked) < 20, "of 29 rounds"


def test_the_engine_shows_a_policy_what_the_writers_have_before_a_drafter_has_its_turn():
    class Repeats:
        def propose(self, best_path, budget):
            return Nodes.chain((3, 4), (-0.1, -0.2))

        def observe(self, seen):
            pass

        def close(self):
            pass

    seen: list[RoundView] = []
    policy = TunedPolicy({"turns": costs()["turns"]}, DraftSettings())
    prepare = policy.prepare
    policy.prepare = lambda view: (seen.append(view), prepare(view))[1]
    target = toy_target(1)
    worker = TargetWorker(target, clock=time.perf_counter, writers={"repeats": lambda request: Repeats()})
    engine = Engine(worker, inline(toy_draft(target, 0.8)), policy=policy)
    request = make_request(0, params=SamplingParams(temperature=0.0, seed=0, max_tokens=6))
    texts = run_all(engine, {0: [request]})
    assert texts[0] == plain(toy_target(1), params=request.params, prompt=request.prompt_ids)
    assert next(offer.tokens for v in seen for offer in v.undrafted) == (3, 4)
