"""The schedule follows what rounds bring, and trials of the others cost no more of the time than their share."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.config import Schedule
from card.engine.policy.modes import REVIEW_ROUNDS, TRIAL_SHARE, Modes
from tests.examples import settings

ALL: frozenset[Schedule] = frozenset({"beside", "turns", "off"})
LAYERS = 4  # of a turn


@dataclass
class World:
    """A machine with a clock of its own: a plain round takes a second, each layer of a turn ``layer_s`` more."""

    agreement: float  # chance of a candidate below an accepted one
    layer_s: float = 0.15
    beside_s: float = 2.0  # of a round beside, which brings as many tokens as a turn of all layers
    crowding: float = 0.0  # by which each further request makes a layer dearer
    seed: int = 0

    def expected(
        self, schedule: Schedule, num_requests: int = 1, num_drafting: int | None = None, is_hoped: bool = False
    ) -> tuple[float, float]:
        """Return the tokens of a request in a round, and its seconds."""
        if schedule == "off":
            return 1.0, 1.0
        tokens = sum(self.agreement**depth for depth in range(LAYERS + 1))
        return tokens, self.beside_s if schedule == "beside" else 1.0 + LAYERS * self._layer_s(num_requests)

    def rate(self, num_requests: int = 1) -> float:
        """Return the tokens of a request per second under the best schedule of turns and plain decoding."""
        turns, off = (self.expected(schedule, num_requests) for schedule in ("turns", "off"))
        return max(turns[0] / turns[1], off[0] / off[1])

    def modes(self, *schedules: Schedule, believed: World | None = None) -> Modes:
        """Return modes that expect of each schedule what it does in this world, or in the one they believe in."""
        return Modes(schedules or ("turns", "off"), (believed or self).expected)

    def run(self, modes: Modes, num_rounds: int, num_requests: int = 1, available: frozenset[Schedule] = ALL) -> Report:
        """Run so many rounds."""
        rng, report = random.Random(self.seed), Report(Counter(), 0.0, 0.0, 0.0)
        for _ in range(num_rounds):
            modes.begin(num_requests, available)
            schedule = modes.schedule
            depth = 0 if schedule == "off" else LAYERS
            agreed = [self._num_agreed(rng, depth) for _ in range(num_requests)]
            tokens = num_requests + sum(agreed)
            seconds = self.beside_s if schedule == "beside" else 1.0 + depth * self._layer_s(num_requests)
            report.add(schedule, tokens, seconds, was_trial=modes.is_trial, rate=num_requests * self.rate(num_requests))
            modes.observe(num_requests, tokens, seconds, num_drafting=num_requests if depth else 0)
        return report

    def _layer_s(self, num_requests: int) -> float:
        return self.layer_s * (1 + self.crowding * (num_requests - 1))

    def _num_agreed(self, rng: random.Random, depth: int) -> int:
        return next((i for i in range(depth) if rng.random() >= self.agreement), depth)


@dataclass
class Learning:
    """Modes whose predictions follow what rounds show of the agreement, as the policy's do."""

    believed: World
    agreed: float = 0.0
    compared: float = 0.0

    def expected(
        self, schedule: Schedule, num_requests: int = 1, num_drafting: int | None = None, is_hoped: bool = False
    ) -> tuple[float, float]:
        """Return what the world promises that has the agreement seen so far."""
        agreement = (self.agreed + 10 * self.believed.agreement) / (self.compared + 10)
        return replace(self.believed, agreement=agreement).expected(schedule, num_requests)

    def modes(self, *schedules: Schedule) -> Modes:
        """Return modes that learn."""
        modes = Modes(schedules or ("turns", "off"), self.expected)
        observe = modes.observe

        def learn(num_requests: int, tokens: float, seconds: float, num_drafting: int = 0) -> None:
            agreed = tokens - num_requests
            seen = min(num_drafting * LAYERS, agreed + num_drafting)
            self.agreed, self.compared = 0.97**seen * self.agreed + agreed, 0.97**seen * self.compared + seen
            observe(num_requests, tokens, seconds, num_drafting=num_drafting)

        modes.observe = learn  # type: ignore[method-assign, assignment]
        return modes


@dataclass
class Report:
    """What some rounds came to."""

    used: Counter[Schedule]
    seconds: float
    tokens: float
    lost_s: float  # in trials, to the best schedule

    def add(self, schedule: Schedule, tokens: int, seconds: float, *, was_trial: bool, rate: float) -> None:
        """Take a round."""
        self.used[schedule] += 1
        self.seconds += seconds
        self.tokens += tokens
        self.lost_s += max(0.0, seconds - tokens / rate) if was_trial else 0.0


GOOD, BAD = World(0.9), World(0.05)


def test_a_schedule_that_brings_less_than_it_promised_is_left_within_few_rounds() -> None:
    modes = BAD.modes(believed=World(0.4))
    assert modes.schedule == "turns"
    assert BAD.run(modes, 40).used["off"] > 20
    assert BAD.run(modes, 400).used["off"] > 350


@pytest.mark.parametrize(("believed", "world"), [(World(0.5), World(0.3)), (World(0.6), World(0.6, layer_s=0.5))])
def test_a_prediction_that_stays_too_high_costs_little_once_rounds_have_shown_it(believed: World, world: World) -> None:
    modes = world.modes(believed=believed)
    world.run(modes, 500)
    report = world.run(modes, 2000)
    assert report.tokens / report.seconds > 0.96 * world.rate()


def test_a_schedule_that_is_worth_it_is_kept_though_its_tokens_scatter() -> None:
    for seed in range(5):
        world = replace(GOOD, seed=seed)
        assert world.run(world.modes(), 1000).used["turns"] > 900


@given(
    agreement=st.floats(0.0, 0.5),
    layer_s=st.floats(0.15, 3.0),
    num_requests=st.sampled_from([1, 2, 6]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_trials_cost_no_more_than_their_share_of_thousands_of_rounds(
    agreement: float, layer_s: float, num_requests: int, seed: int
) -> None:
    world = World(agreement, layer_s=layer_s, seed=seed)
    report = world.run(world.modes(), 4000, num_requests)
    a_trial_s = REVIEW_ROUNDS * (1 + LAYERS * layer_s)  # that may be begun before anything is known
    assert report.lost_s <= 1.25 * TRIAL_SHARE * report.seconds + a_trial_s


def test_a_dear_drafter_is_tried_seldom_and_a_cheap_one_often() -> None:
    dear, cheap = World(0.0, layer_s=2.0), World(0.0, layer_s=0.05)
    used = [world.run(world.modes(), 4000).used["turns"] for world in (dear, cheap)]
    assert 3 <= used[0] < used[1] / 4


def test_a_drafter_that_was_unlucky_at_first_is_taken_back() -> None:
    for num_unlucky in (5, 15, 30):
        modes = GOOD.modes()
        replace(GOOD, agreement=0.0).run(modes, num_unlucky)
        GOOD.run(modes, 150)
        assert GOOD.run(modes, 100).used["turns"] > 80


def test_a_drafter_that_turns_good_later_is_found() -> None:
    modes = Learning(BAD).modes()
    assert BAD.run(modes, 3000).used["turns"] < 300
    GOOD.run(modes, 300)
    assert GOOD.run(modes, 200).used["turns"] > 160


def test_a_drafter_that_nobody_expected_to_be_good_is_found() -> None:
    modes = Learning(World(0.1)).modes()
    assert modes.schedule == "off"
    GOOD.run(modes, 400)
    assert GOOD.run(modes, 200).used["turns"] > 160


def test_plain_decoding_is_computed_and_never_tried() -> None:
    modes = GOOD.modes()
    assert GOOD.run(modes, 3000).used == {"turns": 3000}


def test_plain_decoding_that_becomes_better_later_is_found() -> None:
    modes = GOOD.modes()
    GOOD.run(modes, 2000)
    dear = World(0.9, layer_s=2.0)
    dear.run(modes, 200)
    assert dear.run(modes, 200).used["off"] > 160


def test_each_class_of_batch_sizes_has_its_own_best_schedule() -> None:
    world = World(0.8, layer_s=0.1, crowding=0.5)
    modes = world.modes()
    for _ in range(4):
        world.run(modes, 50, 1)
        world.run(modes, 50, 16)
    assert world.run(modes, 200, 1).used["turns"] > 160
    assert world.run(modes, 200, 16).used["off"] > 160
    assert world.run(modes, 10, 1).used["turns"] >= 8, "it goes on where it was"


def test_a_batch_size_that_was_not_seen_begins_with_what_is_predicted_for_it() -> None:
    world = World(0.8, layer_s=0.1, crowding=0.5)
    modes = world.modes()
    for num_requests, schedule in ((1, "turns"), (16, "off"), (2, "turns")):
        modes.begin(num_requests, ALL)
        assert (modes.schedule, modes.is_trial) == (schedule, False)


def test_a_schedule_that_is_not_available_is_left_at_once_and_taken_up_again() -> None:
    modes = GOOD.modes()
    GOOD.run(modes, 200)
    assert GOOD.run(modes, 50, available=frozenset({"off"})).used["turns"] == 0
    GOOD.run(modes, 100)
    assert GOOD.run(modes, 100).used["turns"] > 80


def test_a_trial_ends_where_its_drafter_goes_away() -> None:
    modes = BAD.modes()
    while not modes.is_trial:
        BAD.run(modes, 1)
        modes.begin(1, ALL)
    assert modes.schedule == "turns"
    modes.begin(1, frozenset({"off"}))
    assert (modes.schedule, modes.is_trial) == ("off", False)


def test_the_only_schedule_left_is_kept_while_its_drafter_is_down() -> None:
    modes = GOOD.modes("turns")
    modes.begin(1, frozenset({"off"}))
    assert (modes.schedule, modes.reason) == ("turns", "no drafter is up")


@pytest.mark.parametrize(("beside_s", "best"), [(1.0, "beside"), (2.4, "turns")])
@pytest.mark.parametrize("believed_s", [1.4, 1.8])
def test_of_three_schedules_the_fastest_is_found_whichever_was_predicted(
    beside_s: float, best: Schedule, believed_s: float
) -> None:
    world = replace(GOOD, beside_s=beside_s)
    modes = world.modes("beside", "turns", "off", believed=replace(GOOD, beside_s=believed_s))
    assert modes.schedule == ("beside" if believed_s < 1.6 else "turns")
    world.run(modes, 400)
    assert world.run(modes, 200).used[best] > 150


def in_a_trial() -> Modes:
    """Return modes that try turns now, where nothing pays but plain decoding."""
    modes = BAD.modes()
    modes.begin(1, ALL)
    while not modes.is_trial:
        BAD.run(modes, 1)
        modes.begin(1, ALL)
    return modes


def test_a_trial_lasts_until_the_next_review() -> None:
    modes, num_rounds = in_a_trial(), 0
    while modes.schedule == "turns":
        modes.observe(1, 1, 1.2, num_drafting=1)
        modes.begin(1, ALL)
        num_rounds += 1
    assert num_rounds == REVIEW_ROUNDS


def test_rounds_in_which_nobody_was_drafted_for_say_nothing_of_a_drafter() -> None:
    modes = in_a_trial()
    believed = modes.rate_of("turns")
    modes.observe(1, 17, 1.2, num_drafting=0)
    assert modes.rate_of("turns") == believed, "what was copied is not the drafter's merit"


def test_a_trial_waits_for_a_drafter_that_reads_a_long_text_and_pays_for_that() -> None:
    modes = in_a_trial()
    for _ in range(3 * REVIEW_ROUNDS):
        modes.observe(1, 1, 31.0, num_drafting=1, is_reading=True)
        modes.begin(1, ALL)
        assert modes.is_trial, "nothing was drafted yet"
    for _ in range(REVIEW_ROUNDS):
        modes.observe(1, 1, 1.6, num_drafting=1)
        modes.begin(1, ALL)
    assert modes.rate_of("turns") > 0.5, "later rounds read nothing"
    assert "turns" not in BAD.run(modes, 1000).used, "360 s of reading are a hundredth of 36000"


def test_what_prompts_take_is_not_charged_to_a_trial() -> None:
    patient, hasty = in_a_trial(), in_a_trial()
    patient.observe(1, 1, 400.0, num_drafting=1, reads_prompts=True)
    hasty.observe(1, 1, 400.0, num_drafting=1)
    assert BAD.run(patient, 1000).used["turns"] > 2 * REVIEW_ROUNDS > BAD.run(hasty, 1000).used["turns"]


def test_no_trial_begins_while_prompts_are_read() -> None:
    modes = BAD.modes()
    for _ in range(1000):
        modes.begin(1, ALL)
        assert not modes.is_trial
        modes.observe(1, 1, 1.0, num_drafting=0, reads_prompts=True)
    assert BAD.run(modes, 2 * REVIEW_ROUNDS).used["turns"] == REVIEW_ROUNDS


def test_rounds_are_held_against_what_was_expected_of_as_many_requests_with_drafts() -> None:
    def expected(schedule: Schedule, num_requests: int, num_drafting: int | None, _: bool) -> tuple[float, float]:
        return 1.0 + (num_requests if num_drafting is None else num_drafting), 1.0

    modes = Modes(("turns", "off"), expected)
    modes.begin(4, ALL)
    before = modes.rate_of("turns")
    modes.observe(4, 8, 1.0, num_drafting=1)
    assert modes.rate_of("turns") == before
    modes.observe(4, 8, 1.0, num_drafting=4)
    assert modes.rate_of("turns") < before


def test_a_schedule_under_which_nobody_is_drafted_for_gives_way_to_plain_decoding() -> None:
    modes, used = World(0.6).modes(), set[Schedule]()
    for _ in range(2 * REVIEW_ROUNDS):
        modes.begin(1, ALL)
        used.add(modes.schedule)
        modes.observe(1, 1, 1.0, num_drafting=0)
    assert used == {"turns", "off"}


def test_a_token_saves_the_more_the_more_drafts_bring() -> None:
    assert BAD.modes().saved_s("turns") < 0 < World(0.7).modes().saved_s("turns") < GOOD.modes().saved_s("turns") < 1


def test_the_rate_is_that_of_the_best_schedule_while_another_one_is_tried() -> None:
    assert in_a_trial().rate == pytest.approx(1.0, rel=0.05)


def test_a_round_without_any_time_says_nothing() -> None:
    modes = GOOD.modes()
    before = modes.rate_of("turns")
    modes.observe(1, 50, 0.0, num_drafting=1)
    assert modes.rate_of("turns") == before
