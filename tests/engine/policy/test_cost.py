"""What a round costs: as measured at start, kept true by ratios."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from card.config import Schedule
from card.engine.policy.cost import REQUEST_S, ROUND_S, Costs, Ratio
from card.engine.policy.rounds import Outcome, RoundView, ScheduleCost
from card.engine.request import StepResult, Verified
from card.machine.expert_cost import ExpertCounts, ExpertUse
from card.machine.pass_cost import PassCost
from card.machine.threads import CoreSet
from card.tree.nodes import NO_NODES
from tests.decoding import make_request


def cost(first_s: float, each_s: float) -> PassCost:
    return PassCost(((1, first_s), (64, first_s + 63 * each_s)))


def costs(drafter: PassCost | None = None) -> Costs:
    drafting, one_core = drafter or cost(1e-3, 5e-5), CoreSet((0,), 1)
    of: dict[Schedule, ScheduleCost] = {
        "beside": ScheduleCost(one_core, cost(1e-2, 1e-3), drafting),
        "turns": ScheduleCost(CoreSet(), cost(7e-3, 5e-4), drafting),
        "off": ScheduleCost(CoreSet(), cost(7e-3, 5e-4)),
    }
    return Costs(of)


def outcome(seconds: float, busy_s: float, num_requests: int = 1, num_rows: int | None = None, **changes) -> Outcome:
    view = RoundView([make_request(i) for i in range(num_requests)], 0, 0, takes_turns=False)
    result = StepResult(num_tokens=num_requests if num_rows is None else num_rows, busy_s=busy_s)
    return replace(Outcome(view, result, seconds, num_requests, 0, 0.0), **changes)


def turn(*seconds: float, num_requests: int = 1) -> RoundView:
    """Return the view of a round whose turn had passes of these seconds."""
    passes = [(num_requests, one) for one in seconds]
    plain = outcome(0, 0, num_requests).view
    return replace(plain, takes_turns=True, passes=passes, waited_s=sum(seconds))


def see_turns(told: Costs, *seconds: float, is_reading: bool = False, num_rounds: int = 50) -> None:
    view = turn(*seconds)
    for _ in range(num_rounds):
        told.observe("turns", 1, outcome(8e-3 + view.waited_s, 7e-3, view=view), is_reading=is_reading)


# ---- ratios ---------------------------------------------------------------------------------------------------------


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


def test_a_first_pass_that_is_a_hiccup_says_no_more_than_it_may():
    bounded, guessed = Ratio(most_at_first=2.0), Ratio()
    for ratio, value in ((bounded, 2.0), (guessed, 500.0)):
        ratio.observe(10.0, 0.02)
        assert ratio.value == pytest.approx(value)
    told, at_start = costs(), costs()
    told.observe("off", 1, outcome(10.0, 9.0))
    assert told.pass_s("off", 1, 1) == pytest.approx(2 * at_start.pass_s("off", 1, 1))


# ---- passes of the target -------------------------------------------------------------------------------------------


def test_a_slower_machine_is_noticed_in_passes_and_around_them_on_its_cores_alone():
    told = costs()
    for _ in range(50):
        told.observe("off", 1, outcome(16e-3, 14e-3))
    assert told.pass_s("off", 1, 1) == pytest.approx(14e-3, rel=0.01)
    assert told.pass_s("turns", 1, 1) == pytest.approx(14e-3, rel=0.01), "the target has the same cores there"
    assert told.pass_s("beside", 1, 1) == pytest.approx(1e-2)
    assert told.around_s("off", 1) == pytest.approx(2e-3, rel=0.01)


def test_each_class_of_rows_has_a_ratio_of_its_own():
    told, at_start = costs(), costs()
    for num_rows, times in ((1, 1.0), (8, 3.0)):
        predicted_s = at_start.pass_s("turns", num_rows, 1)
        for _ in range(50):
            told.observe("turns", 1, outcome(0.1, times * predicted_s, num_rows=num_rows))
    for num_rows, times in ((1, 1.0), (8, 3.0), (5, 3.0)):  # 5 to 8 rows are one class
        expected_s = times * at_start.pass_s("turns", num_rows, 1)
        assert told.pass_s("turns", num_rows, 1) == pytest.approx(expected_s, rel=0.02)


def test_a_candidate_that_fills_a_further_class_of_rows_costs_what_such_passes_were_seen_to_take():
    told, at_start = costs(), costs()
    plain_s, more_s = (at_start.pass_s("off", num_rows, 16) for num_rows in (16, 18))

    def see(num_rows: int, seconds: float, num_passes: int) -> None:
        for _ in range(num_passes):
            told.observe("off", 1, outcome(0.1, seconds, num_requests=16, num_rows=num_rows))

    def seconds(num_rows: int) -> float:
        return told.pass_of("off", outcome(0, 0, num_requests=16).view)(num_rows)

    see(16, plain_s, 50)
    assert seconds(18) == pytest.approx(more_s)
    see(18, 2 * more_s, 1)
    assert seconds(18) == pytest.approx(1.5 * more_s), "one slow pass counts half"
    see(18, 2 * more_s, 100)
    assert seconds(18) == pytest.approx(2 * more_s, rel=0.05)
    assert seconds(16) == pytest.approx(plain_s)
    see(16, 8 * plain_s, 300)  # a slow moment of plain passes: more rows never seem to take less
    assert seconds(18) >= seconds(16)


def test_a_class_of_rows_that_was_not_seen_yet_takes_after_the_nearest_until_it_is():
    told, at_start = costs(), costs()
    for num_rows, times in ((1, 1.5), (32, 3.0)):
        predicted_s = at_start.pass_s("turns", num_rows, 1)
        for _ in range(50):
            told.observe("turns", 1, outcome(0.1, times * predicted_s, num_rows=num_rows))
    for num_rows, times in ((2, 1.5), (24, 3.0), (60, 3.0)):
        expected_s = times * at_start.pass_s("turns", num_rows, 1)
        assert told.pass_s("turns", num_rows, 1) == pytest.approx(expected_s, rel=0.02)
    for _ in range(50):
        told.observe("turns", 1, outcome(0.1, at_start.pass_s("turns", 2, 1), num_rows=2))
    assert told.pass_s("turns", 2, 1) == pytest.approx(at_start.pass_s("turns", 2, 1), rel=0.02)


def test_more_rows_never_make_a_pass_shorter_by_so_much_that_a_row_is_paid_for():
    told, at_start = costs(), costs()
    for num_rows, times in ((4, 2.0), (8, 1.0)):
        for _ in range(50):
            told.observe("turns", 1, outcome(0.1, times * at_start.pass_s("turns", num_rows, 1), num_rows=num_rows))
    assert all(told.row_s("turns", num_rows, 1) >= 0.0 for num_rows in range(1, 20))


def test_a_row_costs_what_further_rows_make_a_pass_longer():
    assert costs().row_s("turns", 4, 1) == pytest.approx(5e-4)
    assert costs().row_s("beside", 4, 1) == pytest.approx(1e-3)


def test_passes_that_read_prompts_besides_say_nothing_of_others():
    told = costs()
    view = replace(outcome(0, 0).view, num_prompt_tokens=40)
    for _ in range(50):
        told.observe("off", 1, outcome(1.1, 1.0, num_rows=41, view=view))
    assert told.pass_s("off", 1, 1) == pytest.approx(7e-3)


def see_prompts(told: Costs, *contexts: int, num_tokens: int = 512, pair_s: float = 1e-6) -> None:
    """Show passes that read prompts behind contexts of these lengths: 1 ms a row, and so long each of its pairs."""
    for num_rows in contexts:
        pairs = num_tokens * num_rows
        view = replace(outcome(0, 0, 0).view, num_prompt_tokens=num_tokens, num_prompt_pairs=pairs)
        took_s = told.at_start["off"].target.seconds(1) + 1e-3 * num_tokens + pair_s * pairs
        told.observe_prompts("off", outcome(1, took_s, 0, view=view))


def behind(num_rows: int) -> RoundView:
    return replace(outcome(0, 0).view, num_context_rows=num_rows)


def test_candidates_behind_a_long_text_cost_what_reading_it_showed():
    told = costs()
    see_prompts(told, 0, 512, 1024, 1536)
    for num_rows in (100, 2000):
        pass_s = told.pass_of("off", behind(num_rows))
        assert pass_s(1) == pytest.approx(7e-3), "a row alone waits for memory"
        assert pass_s(9) == pytest.approx(11e-3 + 8 * num_rows * 1e-6)
        assert told.row_s("off", 1, 1) == pytest.approx(5e-4 + num_rows * 1e-6)
    for _ in range(50):
        took_s = 11e-3 + 8 * 2000 * 1e-6
        told.observe("off", 1, outcome(took_s, took_s, num_rows=9, view=behind(2000)))
    assert told.pass_of("off", behind(100))(9) == pytest.approx(11e-3 + 8 * 100 * 1e-6), "that was no slow machine"


def test_rows_beyond_the_measured_sizes_cost_what_those_of_prompts_do():
    told = costs()
    see_prompts(told, 0, 512, 1024, pair_s=0.0)
    pass_s = told.pass_of("off", behind(100))
    assert pass_s(64) == pytest.approx(7e-3 + 63 * 5e-4)
    assert pass_s(100) - pass_s(64) == pytest.approx(36 * 1e-3)
    routed = with_experts()
    before_s = routed.pass_s("off", 300, 1)
    see_prompts(routed, 0, pair_s=0.0)
    assert routed.pass_s("off", 300, 1) == before_s, "further rows find most experts read"


@pytest.mark.parametrize(
    ("contexts", "num_tokens"),
    [((700, 700, 690), 512), ((0, 30, 60), 512), ((0, 2000), 20)],
    ids=["equal contexts", "short contexts", "few tokens"],
)
def test_passes_that_do_not_show_what_context_costs_say_nothing(contexts, num_tokens):
    told = costs()
    see_prompts(told, *contexts, num_tokens=num_tokens)
    assert told.pass_of("off", behind(2000))(9) == pytest.approx(11e-3)


# ---- experts --------------------------------------------------------------------------------------------------------


def with_experts() -> Costs:
    """Return the costs of a target whose passes take 1 ms and 0.1 ms for each of their experts, 20 a row of 200."""
    counts = ExpertCounts(num_experts=200, per_row=20)
    use = ExpertUse(counts)
    points = tuple((size, 1e-3 + 1e-4 * use.expected(size)) for size in (1, 2, 4, 8, 16, 32, 64))
    target = PassCost(points, experts=counts)
    return Costs({"turns": ScheduleCost(CoreSet(), target, cost(1e-3, 5e-5)), "off": ScheduleCost(CoreSet(), target)})


def see_experts(told: Costs, num_rows: int, num_experts: int, times: float = 1.0, num_rounds: int = 200) -> None:
    seen = outcome(0.1, times * (1e-3 + 1e-4 * num_experts), num_rows=num_rows)
    seen = replace(seen, result=replace(seen.result, num_experts=num_experts))
    for _ in range(num_rounds):
        told.observe("turns", 1, seen)


def test_a_row_costs_the_experts_that_it_brings_and_in_a_longer_pass_it_brings_fewer():
    told = with_experts()
    for num_rows in (1, 5, 40):
        new = 20 * 0.9**num_rows  # of 200 experts, those that nobody has chosen, each with chance 0.1
        assert told.row_s("turns", num_rows, 1) == pytest.approx(1e-4 * new, rel=1e-3)
    assert told.row_s("turns", 8, 8) < told.row_s("turns", 1, 1) / 2, "other requests have read most of them"


def test_rows_that_choose_alike_in_real_passes_become_cheaper_and_the_machine_no_faster():
    told, at_start = with_experts(), with_experts()
    see_experts(told, 8, 60)
    assert told.pass_s("turns", 8, 1) == pytest.approx(1e-3 + 1e-4 * 60, rel=0.01)
    assert told.pass_s("turns", 1, 1) == pytest.approx(at_start.pass_s("turns", 1, 1), rel=0.01)
    assert told.row_s("turns", 2, 1) < 0.6 * at_start.row_s("turns", 2, 1)


def test_a_slower_machine_is_told_from_more_experts():
    told, at_start = with_experts(), with_experts()
    expected = round(200 * (1 - 0.9**8))
    see_experts(told, 8, expected, times=1.5)
    assert told.pass_s("turns", 8, 1) == pytest.approx(1.5 * at_start.pass_s("turns", 8, 1), rel=0.01)


def test_passes_that_do_not_count_their_experts_teach_what_passes_take():
    told, at_start = with_experts(), with_experts()
    for _ in range(50):
        told.observe("turns", 1, outcome(0.1, 2 * at_start.pass_s("turns", 4, 1), num_rows=4))
    assert told.pass_s("turns", 4, 1) == pytest.approx(2 * at_start.pass_s("turns", 4, 1), rel=0.02)


# ---- what lies around -----------------------------------------------------------------------------------------------


def test_python_around_a_round_grows_with_its_requests_and_drafting_makes_it_dearer():
    told = costs()
    assert told.around_s("off", 1) < told.around_s("off", 16) < 16 * told.around_s("off", 1)
    assert told.around_s("off", 16) < told.around_s("turns", 16) == told.around_s("beside", 16)
    for _ in range(50):
        told.observe("off", 1, outcome(7e-3 + 3.2e-3, 7e-3, 16))
    assert told.around_s("off", 16) == pytest.approx(3.2e-3, rel=0.01)


def test_verifying_what_writers_offer_makes_those_rounds_dearer_and_no_others():
    told = costs()
    plain_s = told.around_s("off", 4)
    assert told.around_s("off", 4, 3.0) == pytest.approx(plain_s + 3 * REQUEST_S)
    offer = msgspec.structs.replace(NO_NODES, writers=(2,))
    verified = [Verified(i, offer, (), True) for i in range(4)]
    for _ in range(50):
        seen = outcome(7e-3 + plain_s + 4 * REQUEST_S, 7e-3, 4)
        told.observe("off", 1, replace(seen, result=replace(seen.result, verified=verified)))
    assert told.around_s("off", 4) == pytest.approx(plain_s)


# ---- passes of the drafter ------------------------------------------------------------------------------------------


def test_a_layer_in_turns_takes_what_was_waited_unless_texts_were_read():
    untold = costs().draft_s("turns", 1)
    for is_reading, expected_s in ((False, 3e-3), (True, untold)):
        told = costs()
        see_turns(told, 3e-3, 3e-3, is_reading=is_reading)
        assert told.draft_s("turns", 1) == pytest.approx(expected_s, rel=0.01)


def test_the_first_pass_of_a_turn_is_told_from_further_ones():
    told = costs()
    assert told.first_draft_s("turns", 1) > told.draft_s("turns", 1), "the weights have left the caches"
    see_turns(told, 4e-3)
    assert told.first_draft_s("turns", 1) == pytest.approx(4e-3, rel=0.01)
    assert told.draft_s("turns", 1) < 1.1 * (1e-3 + ROUND_S), "a single pass says nothing of further ones"
    see_turns(told, 4e-3, 2e-3, 2e-3, 2e-3)
    assert told.first_draft_s("turns", 1) == pytest.approx(4e-3, rel=0.01)
    assert told.draft_s("turns", 1) == pytest.approx(2e-3, rel=0.01)


def test_a_first_pass_that_is_faster_than_was_measured_makes_further_ones_cheaper_too():
    told = costs()
    see_turns(told, 4e-4)
    assert told.draft_s("turns", 1) <= 4.1e-4


def test_a_hiccup_does_not_make_drafting_dear_for_ever():
    told = costs()
    see_turns(told, 0.1, num_rounds=1)
    assert told.draft_s("turns", 1) <= 2e-3
    see_turns(told, 1.2e-3, num_rounds=400)
    assert told.first_draft_s("turns", 1) < 2e-3


def test_passes_of_a_drafter_beside_are_learnt_from_what_it_reports():
    told = costs()
    for _ in range(50):
        told.observe("beside", 1, outcome(1e-2, 1e-2, drafter_passes=4, drafter_busy_s=8e-3))
    assert told.draft_s("beside", 1) == pytest.approx(2e-3, rel=0.01)
    told, at_start = costs(), costs()
    told.observe("beside", 1, outcome(1e-2, 1e-2, drafter_passes=1, drafter_busy_s=9.0))
    assert told.draft_s("beside", 1) == pytest.approx(2 * at_start.draft_s("beside", 1)), "a hiccup"
    assert told.draft_s("off", 1) == 0.0


def test_to_read_takes_a_drafter_longer_the_more_there_is_and_nothing_where_none_runs():
    told = costs()
    seconds = [told.reading_s("turns", num_tokens) for num_tokens in (0, 1, 20, 5000)]
    assert 0.0 == seconds[0] < seconds[1] < seconds[2] < seconds[3]
    assert told.reading_s("off", 20) == 0.0
