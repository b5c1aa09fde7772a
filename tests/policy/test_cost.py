"""What a round costs: as measured at start, kept true by ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from card.machine.threads import CoreSet
from card.policy.cost import REQUEST_S, Costs, PassCost, Ratio, ScheduleCost
from card.policy.rounds import Outcome, RoundView, Schedule
from card.workers.request import StepResult
from tests.decoding import make_request


def cost(first_s: float, each_s: float) -> PassCost:
    return PassCost(((1, first_s), (64, first_s + 63 * each_s)))


def costs(drafter: PassCost | None = None) -> Costs:
    drafting, core_set = drafter or cost(1e-3, 5e-5), CoreSet()
    of: dict[Schedule, ScheduleCost] = {
        "beside": ScheduleCost(core_set, cost(1e-2, 1e-3), drafting),
        "turns": ScheduleCost(core_set, cost(7e-3, 5e-4), drafting),
        "off": ScheduleCost(core_set, cost(7e-3, 5e-4)),
    }
    return Costs(of)


def outcome(seconds: float, busy_s: float, num_requests: int = 1, **changes: object) -> Outcome:
    view = RoundView([make_request(i) for i in range(num_requests)], 0, 0, takes_turns=False)
    given = Outcome(view, StepResult(num_tokens=num_requests, busy_s=busy_s), seconds, num_requests, 0, 0.0)
    return replace(given, **changes)  # type: ignore[arg-type]


def test_a_ratio_is_1_at_first_follows_the_machine_and_shrugs_a_hiccup_off():
    ratio = Ratio()
    assert ratio.value == 1.0
    for _ in range(50):
        ratio.observe(0.03, 0.02)
    assert ratio.value == pytest.approx(1.5)
    ratio.observe(10.0, 0.02)
    assert ratio.value < 1.6
    ratio.observe(0.0, 0.02)
    ratio.observe(0.02, 0.0)
    assert ratio.value < 1.6, "a clock too coarse for the pass says nothing"


def test_a_slower_machine_is_noticed_in_passes_and_around_them_under_its_schedule_alone():
    told = costs()
    for _ in range(50):
        told.observe("off", 1, outcome(16e-3, 14e-3))
    assert told.pass_s("off", 1, 1) == pytest.approx(14e-3, rel=0.01)
    assert told.pass_s("beside", 1, 1) == pytest.approx(1e-2)
    assert told.around_s("off", 1) == pytest.approx(2e-3, rel=0.01)


def test_a_first_drafter_pass_that_is_a_hiccup_does_not_make_drafting_dear_for_ever():
    told = costs()
    view = replace(outcome(0, 0).view, takes_turns=True, num_passes=1, waited_s=0.1)
    told.observe("turns", 1, outcome(0.11, 7e-3, view=view))
    assert told.draft_s("turns", 1, 1) <= 2e-3


def test_python_around_a_round_grows_with_its_requests_and_drafting_doubles_it_until_measured():
    told = costs()
    assert told.around_s("off", 16) == pytest.approx(16 * REQUEST_S)
    assert told.around_s("beside", 16) == pytest.approx(32 * REQUEST_S)
    for _ in range(50):
        told.observe("off", 1, outcome(7e-3 + 3.2e-3, 7e-3, 16))
    assert told.around_s("off", 16) == pytest.approx(3.2e-3, rel=0.01)
    assert told.around_s("turns", 16) == pytest.approx(6.4e-3, rel=0.01), "a slow machine is slow for all"


def test_what_makes_drafting_dearer_is_expected_under_a_schedule_not_used_yet():
    told = costs()
    for _ in range(50):
        told.observe("beside", 1, outcome(1e-2, 1e-2, drafter_passes=4, drafter_busy_s=8e-3))
    assert told.draft_s("beside", 1, 1) == pytest.approx(2e-3, rel=0.01)
    assert told.draft_s("turns", 1, 1) == pytest.approx(2e-3, rel=0.01)
    assert told.draft_s("off", 1, 1) == 0.0


def turn(num_passes: int, waited_s: float, first_pass_s: float, num_unread: int = 0) -> RoundView:
    """Return the view of a round in turns."""
    seconds = {"waited_s": waited_s, "first_pass_s": first_pass_s}
    return replace(outcome(0, 0).view, takes_turns=True, num_passes=num_passes, num_unread=num_unread, **seconds)


def test_a_layer_in_turns_takes_what_was_waited_unless_texts_were_read():
    for num_unread, expected_s in ((0, 3e-3), (1, 1e-3)):
        told = costs()
        for _ in range(50):
            told.observe("turns", 1, outcome(15e-3, 7e-3, view=turn(2, 6e-3, 3e-3, num_unread)))
        assert told.draft_s("turns", 1, 1) == pytest.approx(expected_s, rel=0.01)


def test_the_first_pass_of_a_turn_is_told_from_further_ones():
    told = costs()
    assert told.first_draft_s("turns", 1, 1) == told.draft_s("turns", 1, 1), "nothing is known of it yet"
    for _ in range(50):
        told.observe("turns", 1, outcome(15e-3, 7e-3, view=turn(1, 4e-3, 4e-3)))
    assert told.first_draft_s("turns", 1, 1) == pytest.approx(4e-3, rel=0.01)
    assert told.draft_s("turns", 1, 1) == pytest.approx(1e-3), "a single pass says nothing of further ones"
    for _ in range(50):
        told.observe("turns", 1, outcome(15e-3, 7e-3, view=turn(4, 10e-3, 4e-3)))
    assert told.draft_s("turns", 1, 1) == pytest.approx(2e-3, rel=0.01)
    assert told.first_draft_s("beside", 1, 1) == told.draft_s("beside", 1, 1), "beside, nobody waits for the first one"
