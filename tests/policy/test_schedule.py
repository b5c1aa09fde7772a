"""The bandit over schedules: as predicted at first, as measured later; a switch must pay, and old knowledge fades."""

from __future__ import annotations

import math
import random

import pytest

from card.policy.rounds import Schedule
from card.policy.schedule import PRIOR_SD, Schedules, bucket

ALL: frozenset[Schedule] = frozenset({"beside", "turns", "off"})


def made(predicted: dict[Schedule, float]) -> Schedules:
    return Schedules(predicted, lambda schedule, num_requests: num_requests * predicted[schedule])


def run(
    schedules: Schedules,
    speed: dict[Schedule, float],
    num_rounds: int,
    *,
    num_requests: int = 1,
    available: frozenset[Schedule] = ALL,
    noise: float = 0.0,
) -> dict[Schedule, int]:
    """Return how many rounds ran under each schedule, where they have these tokens/s."""
    used, rng = dict.fromkeys(speed, 0), random.Random(1)
    for _ in range(num_rounds):
        schedules.begin(num_requests, available & frozenset(speed))
        used[schedules.schedule] += 1
        num_tokens = num_requests * 0.02 * speed[schedules.schedule] * rng.uniform(1 - noise, 1 + noise)
        schedules.observe(num_requests, num_tokens, 0.02)
    return used


def test_it_begins_with_the_best_prediction_and_says_what_is_expected():
    schedules = made({"beside": 300.0, "turns": 200.0, "off": 100.0})
    assert schedules.schedule == "beside"
    run(schedules, {"beside": 300.0, "turns": 200.0, "off": 100.0}, 40)
    assert schedules.schedule == "beside"
    assert "300 tokens/s beside" in schedules.reason


@pytest.mark.parametrize("best", sorted(ALL))
@pytest.mark.parametrize("num_requests", [1, 16])
def test_where_predictions_are_close_the_measured_best_is_used(best, num_requests):
    schedules = made(dict.fromkeys(("beside", "turns", "off"), 300.0))
    speed = {schedule: 400.0 if schedule == best else 300.0 for schedule in ("beside", "turns", "off")}
    run(schedules, speed, 1000, num_requests=num_requests, noise=0.5)
    assert run(schedules, speed, 500, num_requests=num_requests, noise=0.5)[best] > 400


def test_a_schedule_that_gives_less_than_it_promised_is_left_and_tried_again_only_when_that_has_faded():
    schedules = made({"beside": 300.0, "off": 200.0})
    speed = {"beside": 150.0, "off": 200.0}
    used = run(schedules, speed, 200)
    assert 4 < used["beside"] < 100
    assert run(schedules, speed, 1000)["beside"] < 150
    assert run(schedules, {"beside": 300.0, "off": 200.0}, 3000)["beside"] > 1000


def test_chance_in_a_few_rounds_switches_nothing():
    schedules = made({"beside": 300.0, "off": 200.0})
    assert run(schedules, {"beside": 300.0, "off": 200.0}, 1000, noise=1.0)["off"] == 0


def test_the_first_batch_size_costs_no_switch():
    predicted = {1: {"beside": 300.0, "off": 200.0}, 16: {"beside": 200.0, "off": 300.0}}
    schedules = Schedules(("beside", "off"), lambda schedule, n: predicted[n][schedule])
    assert schedules.schedule == "beside"
    schedules.begin(16, ALL)
    assert schedules.schedule == "off"


def test_each_batch_size_keeps_its_own_record():
    schedules = made(dict.fromkeys(("beside", "off"), 300.0))
    few, many = {"beside": 400.0, "off": 200.0}, {"beside": 200.0, "off": 400.0}
    for _ in range(4):
        run(schedules, few, 100)
        run(schedules, many, 100, num_requests=16)
    assert run(schedules, few, 100)["beside"] > 90
    assert run(schedules, many, 100, num_requests=16)["off"] > 90


def test_a_gain_is_taken_once_it_has_paid_for_the_switch():
    """One that promises a quarter more saves two rounds in eight, one that promises four times as much in one."""
    predicted: dict[Schedule, float] = {"beside": 300.0, "off": 200.0}
    schedules = Schedules(predicted, lambda schedule, _: predicted[schedule])
    run(schedules, predicted, 8)
    predicted["off"] = 375.0
    assert 4 <= run(schedules, predicted, 40)["beside"] <= 16
    predicted["beside"] = 1500.0
    assert run(schedules, predicted, 40)["off"] <= 4


def test_a_schedule_whose_drafter_is_gone_is_left_at_once_and_the_only_one_is_kept():
    schedules = made({"beside": 300.0, "turns": 200.0, "off": 100.0})
    speed = {"beside": 300.0, "turns": 200.0, "off": 100.0}
    run(schedules, speed, 10)
    assert run(schedules, speed, 5, available=frozenset({"turns", "off"}))["beside"] == 0
    assert run(schedules, speed, 40)["beside"] > 30
    only = made({"beside": 300.0})
    only.begin(1, frozenset({"off"}))
    assert (only.schedule, only.reason) == ("beside", "no drafter is up")


def test_schedules_that_draft_share_what_is_wrongly_expected_of_the_drafter_and_rest_does_not():
    schedules = made({"beside": 300.0, "turns": 290.0, "off": 100.0})
    run(schedules, {"beside": 150.0, "turns": 150.0, "off": 100.0}, 12)
    assert schedules.estimate("turns")[0] < math.log(290.0) - PRIOR_SD
    assert schedules.estimate("off")[0] == pytest.approx(math.log(100.0))


def test_a_try_drafts_at_once_whatever_is_expected_and_ends_at_once_if_that_does_not_change():
    schedules = made({"beside": 100.0, "turns": 200.0, "off": 300.0})
    speed = {"beside": 100.0, "turns": 200.0, "off": 300.0}
    run(schedules, speed, 10)
    drafting, none = ALL - {"off"}, frozenset[Schedule]()
    for tried, schedule in ((none, "off"), (drafting, "turns"), (drafting, "turns"), (none, "off")):
        schedules.begin(1, ALL, tried=tried)
        schedules.observe(1, 4.0, 0.02)
        assert schedules.schedule == schedule
    assert schedules.rate == pytest.approx(300.0, rel=0.1), "a second is worth what rest makes of it"


def test_a_try_doubts_what_few_rounds_that_drafted_gave_and_not_what_rest_gave():
    schedules = made({"turns": 300.0, "off": 200.0})
    run(schedules, {"turns": 100.0, "off": 150.0}, 40)
    assert schedules.schedule == "off"
    before = {schedule: schedules.estimate(schedule)[0] for schedule in ("turns", "off")}
    schedules.begin(1, ALL, tried=ALL - {"off"})
    assert schedules.estimate("turns")[0] > before["turns"] + PRIOR_SD
    assert schedules.estimate("off")[0] == pytest.approx(before["off"], abs=0.02)


def test_a_second_is_worth_what_the_best_schedule_makes_of_it():
    schedules = made({"beside": 300.0, "off": 200.0})
    for _ in range(9):
        schedules.begin(1, ALL)
        schedules.observe(1, 1.0, 0.02)
    assert schedules.rate > 199.0, "however little the present one gives"


def test_rounds_in_which_some_only_read_their_prompts_promise_less():
    told = [made({"beside": 300.0, "off": 100.0}) for _ in range(2)]
    for schedules, num_decoding in zip(told, (4, 1), strict=True):
        for _ in range(20):
            schedules.begin(4, ALL)
            schedules.observe(num_decoding, num_decoding * 6.0, 0.02)
    means = [schedules.estimate("beside")[0] for schedules in told]
    assert means[0] == pytest.approx(means[1])


def test_batch_sizes_are_told_apart_by_powers_of_two():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]
