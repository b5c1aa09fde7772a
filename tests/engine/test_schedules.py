"""Which schedule is used: luck does not decide, evidence does, and what is known survives a change of text."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from card.engine.forecast import Acceptance
from card.engine.schedules import Schedules, _Account
from card.transport.switch import Arm

ALL: frozenset[Arm] = frozenset({"beside", "off"})


class Told:
    """A forecast that says what the test wants."""

    has_writers = False
    num_texts = 0

    def __init__(self, **tokens_per_s: float) -> None:
        self.now = tokens_per_s
        self.stations = dict.fromkeys(tokens_per_s)

    def tokens_per_s(self, arm: Arm, num_requests: int, *, seen: Acceptance | None = None) -> float:
        return self.now[arm]

    def take_lately(self) -> Acceptance:
        return Acceptance()

    def prompt_token_s(self, arm: Arm) -> float:
        return 0.0


def run(
    schedules: Schedules,
    speed: dict[str, float],
    num_rounds: int,
    *,
    seconds: float = 0.02,
    available: frozenset[Arm] = ALL,
    num_requests: int = 1,
) -> list[Arm]:
    used: list[Arm] = []
    for _ in range(num_rounds):
        schedules.begin(num_requests, available)
        used.append(schedules.arm)
        schedules.observe(seconds * speed[schedules.arm], 4, 0, seconds)
    return used


def run_until(schedules: Schedules, arm: Arm, speed: dict[str, float]) -> None:
    """Run until this schedule is used, for one round."""
    assert any(run(schedules, speed, 1) == [arm] for _ in range(1000))


def test_it_begins_with_the_schedule_that_promises_most():
    assert Schedules(Told(beside=200.0, off=100.0)).arm == "beside"
    assert Schedules(Told(beside=100.0, off=200.0)).arm == "off"


def test_a_few_unlucky_rounds_do_not_change_the_schedule():
    schedules = Schedules(Told(beside=200.0, off=150.0))
    run(schedules, {"beside": 200.0, "off": 150.0}, 100)
    used = run(schedules, {"beside": 130.0, "off": 97.0}, 12)
    assert set(used) == {"beside"}


@pytest.mark.parametrize(
    ("ratio", "num_rounds", "least", "most"),
    [
        (0.9, 14, 0.97, 1.0),  # a dozen rounds of a few tokens: chance
        (0.9, 1400, 0.90, 0.91),
        (0.5, 14, 0.6, 0.9),  # rather not
        (0.5, 100, 0.5, 0.55),
        (2.0, 100, 1.8, 2.0),
    ],
)
def test_a_promise_that_was_not_kept_counts_the_more_the_less_it_may_be_chance(ratio, num_rounds, least, most):
    account = _Account(promised=100.0, committed=100.0 * ratio, rounds=num_rounds)
    assert least <= account.bias(1.0) <= most
    assert account.bias(ratio) == pytest.approx(ratio)
    assert _Account(promised=100.0, committed=0.0, rounds=5.0).bias(0.0) == pytest.approx(0.0)


def test_tokens_that_come_in_lumps_are_no_reason_to_go_to_and_fro():
    rng, schedules = random.Random(3), Schedules(Told(beside=200.0, off=160.0))
    used: list[Arm] = []
    for _ in range(800):
        lump = rng.choice([0.2, 0.5, 1.0, 2.3])  # of the mean
        used += run(schedules, {"beside": 200.0 * lump, "off": 160.0 * lump}, 1)
    switches = sum(a != b for a, b in pairwise(used))
    assert used.count("beside") > 650
    assert switches <= 16


def tried_in_vain(told: Told) -> Schedules:
    """Return schedules that use ``beside``, so soon after a trial of ``off`` that none is due for long."""
    schedules = Schedules(told)
    for arm in ("off", "beside"):
        run_until(schedules, arm, told.now)
    return schedules


@pytest.mark.parametrize(("off", "first", "last"), [(345.0, 0, 15), (318.0, 32, 47)])
def test_a_schedule_is_taken_once_it_would_have_saved_what_a_switch_takes(off, first, last):
    told = Told(beside=300.0, off=250.0)
    schedules = tried_in_vain(told)
    told.now = {"beside": 300.0, "off": off}
    used = run(schedules, told.now, 64)
    assert first <= used.index("off") <= last


def test_a_schedule_that_is_better_and_worse_by_turns_is_not_taken():
    told = Told(beside=300.0, off=250.0)
    schedules = tried_in_vain(told)
    used: list[Arm] = []
    for off in (320.0, 280.0) * 2:
        told.now = {"beside": 300.0, "off": off}
        used += run(schedules, told.now, 16)
    assert set(used) == {"beside"}


def test_what_was_regretted_before_a_switch_does_not_lead_back():
    told = Told(beside=300.0, off=250.0)
    schedules = tried_in_vain(told)
    told.now = {"beside": 300.0, "off": 345.0}
    run_until(schedules, "off", told.now)
    told.now = {"beside": 306.0, "off": 300.0}
    assert set(run(schedules, told.now, 48)) == {"off"}


def test_a_promise_that_is_not_kept_is_found_out():
    schedules = Schedules(Told(beside=300.0, off=200.0))
    used = run(schedules, {"beside": 150.0, "off": 200.0}, 400)
    assert used[-100:].count("off") >= 80


def test_what_was_learnt_of_one_text_holds_for_another_that_is_easier_for_both():
    told = Told(beside=300.0, off=200.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 150.0, "off": 200.0}, 600)
    told.now = {"beside": 450.0, "off": 300.0}  # half of what is promised beside is kept, as before
    used = run(schedules, {"beside": 225.0, "off": 300.0}, 64)
    assert used.count("off") >= 48


def test_hard_rounds_of_a_text_are_no_broken_promise_of_the_schedule_that_had_them():
    class Heard(Told):
        share = 1.0  # of the promised speed, as the rounds of a review show of their text

        def tokens_per_s(self, arm: Arm, num_requests: int, *, seen: Acceptance | None = None) -> float:
            return self.now[arm] * (1.0 if seen is None else self.share)

    told = Heard(beside=200.0, off=300.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 200.0, "off": 300.0}, 100)  # rest kept its promise
    told.now, told.share = {"beside": 400.0, "off": 300.0}, 0.5
    used = run(schedules, {"beside": 200.0, "off": 150.0}, 300)
    assert "off" not in used[20:], "what it gave in hard rounds is what it promised for them"


def test_the_promises_for_a_new_kind_of_text_are_believed_without_a_trial():
    told = Told(beside=300.0, off=100.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 300.0, "off": 100.0}, 60)
    told.now = {"beside": 300.0, "off": 900.0}  # other writers get much accepted now
    used = run(schedules, {"beside": 300.0, "off": 900.0}, 40)
    assert used.count("off") >= 12


def test_among_several_writers_a_schedule_that_met_a_slow_moment_when_it_was_tried_is_tried_again():
    class Several(Told):
        has_writers = True

    both: frozenset[Arm] = frozenset({"beside", "turns"})
    schedules = Schedules(Several(beside=300.0, turns=310.0))
    slow = run(schedules, {"beside": 200.0, "turns": 310.0}, 80, available=both)
    assert 0 < slow.count("beside") < 20
    used = run(schedules, {"beside": 400.0, "turns": 310.0}, 600, available=both)
    assert used.count("beside") > 400


def test_the_rate_is_that_of_the_present_schedule_as_it_was_measured_lately():
    schedules = Schedules(Told(beside=300.0, off=100.0))
    assert schedules.rate() == 300.0
    run(schedules, {"beside": 250.0, "off": 100.0}, 30)
    assert 249.0 < schedules.rate() < 251.0


@pytest.mark.parametrize("num_tokens, is_used", [(16, True), (17, False)])
def test_prompts_that_are_read_while_others_decode_count_against_fewer_cores(num_tokens, is_used):
    class Reading(Told):
        def prompt_token_s(self, arm: Arm) -> float:
            return 1e-3 if arm == "beside" else 1e-4

    speed = {"beside": 300.0, "off": 200.0}
    schedules = Schedules(Reading(**speed))
    used: list[Arm] = []
    for _ in range(200):
        used += run(schedules, speed, 1)
        schedules.observe(1, num_tokens, 16, 0.02)
    assert used.count("beside") > 140 if is_used else used.count("off") > 100


def test_the_rate_of_a_new_text_is_as_predicted_until_some_rounds_measured_it():
    told = Told(beside=200.0, off=100.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 220.0, "off": 100.0}, 600)
    told.num_texts += 1
    told.now = {"beside": 100.0, "off": 50.0}  # as expected of the new text
    run(schedules, {"beside": 900.0, "off": 50.0}, 2)  # it begins with luck
    assert schedules.rate() == pytest.approx(110.0, rel=0.15), "corrected by what was committed of earlier promises"
    run(schedules, {"beside": 130.0, "off": 50.0}, 30)
    assert schedules.rate() == pytest.approx(170.0, rel=0.15), "measured, luck included"


def test_the_rate_follows_the_prediction_as_long_as_it_is_not_measured():
    told = Told(beside=200.0, off=100.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 200.0, "off": 100.0}, 2)
    assert schedules.rate() == 200.0
    told.now = {"beside": 150.0, "off": 100.0}
    run(schedules, {"beside": 200.0, "off": 100.0}, 4)
    assert schedules.rate() == pytest.approx(150.0, rel=0.05)


class Kept(Told):
    """A forecast by which no schedule ever breaks its promise."""

    speed = 200.0  # reached

    def tokens_per_s(self, arm: Arm, num_requests: int, *, seen: Acceptance | None = None) -> float:
        return self.now[arm] if seen is None else self.speed

    def write(self, schedules: Schedules, *stretches: tuple[float, int]) -> None:
        """Write a text of stretches with so many tokens/s and rounds each."""
        self.num_texts += 1
        for self.speed, num_rounds in stretches:
            run(schedules, {"beside": self.speed, "off": 50.0}, num_rounds)


def test_the_rate_counts_on_a_text_to_go_on_as_others_did_that_began_like_it():
    told = Kept(beside=200.0, off=50.0)
    schedules = Schedules(told)
    assert schedules.rate() == 200.0
    for _ in range(12):
        told.write(schedules, (200.0, 12), (400.0, 24))
    told.write(schedules, (200.0, 1))
    assert 260.0 < schedules.rate() < 400.0
    for _ in range(12):
        told.write(schedules, (200.0, 36))
    assert schedules.rate() == pytest.approx(200.0, rel=0.1), "as those went on that came last"


def test_what_was_believed_of_one_text_is_not_held_against_another():
    told = Kept(beside=200.0, off=50.0)
    schedules = Schedules(told)
    for _ in range(12):
        told.now = {"beside": 800.0, "off": 50.0}
        told.write(schedules, (800.0, 10))
        told.now = {"beside": 200.0, "off": 50.0}
        told.write(schedules, (200.0, 40))
    told.write(schedules, (200.0, 1))
    assert schedules.rate() == pytest.approx(200.0, rel=0.05)


def test_what_a_text_gives_much_later_says_nothing_of_its_beginning():
    told = Kept(beside=200.0, off=50.0)
    schedules = Schedules(told)
    told.write(schedules, (200.0, 60), (800.0, 600))
    told.write(schedules, (200.0, 1))
    assert schedules.rate() < 400.0


def test_one_new_text_in_a_batch_leaves_the_rate_measured():
    told = Told(beside=200.0, off=100.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 260.0, "off": 100.0}, 100, num_requests=4)
    told.num_texts += 1
    told.now = {"beside": 100.0, "off": 50.0}
    run(schedules, {"beside": 260.0, "off": 50.0}, 1, num_requests=4)
    assert schedules.rate() == pytest.approx(260.0)


def test_the_rate_is_soon_that_of_a_new_text():
    told = Told(beside=200.0, off=100.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 400.0, "off": 100.0}, 200)
    told.num_texts += 1
    run(schedules, {"beside": 100.0, "off": 100.0}, 12)
    assert schedules.rate() < 250


def test_a_new_text_is_looked_at_early():
    told = Told(beside=300.0, off=100.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 300.0, "off": 100.0}, 50)
    told.num_texts, told.now = 1, {"beside": 300.0, "off": 900.0}
    used = run(schedules, {"beside": 300.0, "off": 900.0}, 10)
    assert used[-1] == "off"


@pytest.mark.parametrize(("off", "first_used"), [(900.0, 1), (330.0, 3), (318.0, 6)])
def test_the_plainer_a_schedule_is_better_for_a_new_text_the_sooner_it_is_taken(off, first_used):
    told = Told(beside=300.0, off=100.0)
    schedules = Schedules(told)
    run(schedules, {"beside": 300.0, "off": 100.0}, 50)
    told.num_texts, told.now = 1, {"beside": 300.0, "off": off}
    used = run(schedules, {"beside": 300.0, "off": off}, 10)
    assert used.index("off") == first_used


def test_a_look_at_a_new_text_does_not_end_a_first_trial():
    told = Told(beside=300.0, off=200.0)
    schedules = Schedules(told)
    run_until(schedules, "off", {"beside": 300.0, "off": 400.0})
    told.num_texts = 1
    assert set(run(schedules, {"beside": 300.0, "off": 400.0}, 10)) == {"off"}


def test_a_later_trial_ends_where_a_new_text_is_plainly_worse_for_it():
    told, speed = Told(beside=300.0, off=290.0), {"beside": 300.0, "off": 290.0}
    schedules = Schedules(told)
    for arm in ("off", "beside", "off"):  # the first trial, in vain, and the next one
        run_until(schedules, arm, speed)
    run(schedules, speed, 6)
    told.num_texts, told.now = 1, {"beside": 600.0, "off": 290.0}
    used = run(schedules, told.now, 10)
    assert used.index("beside") == 1


def test_what_becomes_plainly_better_in_the_midst_of_a_text_is_taken_soon():
    told = Told(beside=300.0, off=280.0)
    schedules = tried_in_vain(told)
    run(schedules, told.now, 40)
    told.now = {"beside": 300.0, "off": 400.0}
    assert run(schedules, told.now, 20).index("off") <= 8


def test_a_later_trial_of_a_close_schedule_lasts_its_rounds():
    told, speed = Told(beside=300.0, off=270.0), {"beside": 300.0, "off": 270.0}
    schedules = Schedules(told)
    for arm in ("off", "beside", "off"):  # the first trial, in vain, and the next one
        run_until(schedules, arm, speed)
    assert run(schedules, speed, 60).index("beside") >= 40


def test_the_first_look_at_a_text_puts_off_none():
    told = Told(beside=300.0, off=200.0)
    schedules = tried_in_vain(told)
    run(schedules, told.now, 40)
    told.num_texts += 1
    run(schedules, told.now, 2)  # it begins like the text before
    told.now = {"beside": 300.0, "off": 400.0}
    assert run(schedules, told.now, 10).index("off") <= 2


def test_what_texts_of_another_kind_keep_in_use_is_not_tried():
    kinds = ({"beside": 300.0, "off": 240.0}, {"beside": 300.0, "off": 500.0})
    told = Told(**kinds[0])
    schedules = Schedules(told)
    trials = []
    for idx in range(40):
        told.num_texts, told.now = told.num_texts + 1, kinds[idx % 2]
        run(schedules, told.now, 40)
        trials.append(schedules._learnt["off"].trials + schedules._learnt["beside"].trials)
    assert trials[-1] == trials[9], "each is in use in every second text"
