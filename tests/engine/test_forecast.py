"""What the schedules promise: by latencies, by the drafter's agreement, and by what other writers get accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from card.config import DraftSettings
from card.engine.cores import Home
from card.engine.forecast import Acceptance, Forecast, Guess, Station
from card.engine.latency import PassCost
from card.engine.policy import Outcome, RoundView
from card.transport.switch import Arm
from card.tree.nodes import Candidates
from card.workers.request import StepResult, Verified
from tests.decoding import make_request


def cost(first_s: float, each_s: float) -> PassCost:
    return PassCost(((1, first_s), (64, first_s + 63 * each_s)))


def forecast(drafter: PassCost | None = None) -> Forecast:
    home, beside, alone = Home(), cost(1e-2, 1e-4), cost(7e-3, 1e-4)
    drafter = drafter or cost(1e-3, 5e-5)
    stations: dict[Arm, Station] = {
        "beside": Station(home, beside, drafter),
        "turns": Station(home, alone, drafter),
        "off": Station(home, alone),
    }
    return Forecast(stations, DraftSettings(), frozenset())


def chain(*writers: str) -> Candidates:
    ids = tuple(range(len(writers)))
    return Candidates(ids, ids, tuple(i - 1 for i in ids), (-0.1,) * len(ids), tuple(i + 1 for i in ids), writers)


def see(
    told: Forecast,
    offer: Candidates,
    chance: float,
    num_rounds: int,
    num_agreed: int | None = None,
    num_accepted: int = 0,
) -> None:
    """Let a forecast see rounds in which each candidate of a chain had this chance, and the first so many came true."""
    compared, accepted = (0, 0) if num_agreed is None else (1, num_agreed), tuple(range(num_accepted))
    verified = [Verified(0, offer, accepted, True, *compared)]
    result = StepResult(verified=verified, num_tokens=1 + len(offer), busy_s=7e-3 + 1e-4 * len(offer))
    view = RoundView([make_request(0)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
    for _ in range(num_rounds):
        guess = Guess.of(offer, [chance] * len(offer), accepted)
        told.observe("off", 1, Outcome(view, result, 0.01, 1, 0, 0.0), [guess])


def test_a_guess_is_the_best_chance_of_others_at_each_depth():
    offer = Candidates(
        ids=tuple(range(6)),
        tokens=tuple(range(6)),
        parents=(-1, -1, 0, 1, 1, 3),
        path_logprobs=(-0.1,) * 6,
        depths=(1, 1, 2, 2, 2, 3),
        writers=("beam", "beam+suffix", "recycling", "suffix", "recycling", "beam2+suffix"),
    )
    guess = Guess.of(offer, [0.9, 0.3, 0.8, 0.2, 0.1, 0.2], (1, 3, 5))
    assert guess.chances[:4] == (0.3, 0.2, 0.2, 0.0), "what the drafter alone proposed, or what hangs below, is none"
    assert guess.came_true[:4] == (1.0, 1.0, 1.0, 0.0)
    assert guess.num_rows == 4, "without the drafter they would be verified all the same"
    assert guess.num_given == 4.0, "with the target's own token"
    assert Guess.of(offer, [0.5] * 6, (0, 2)).came_true[:3] == (0.0, 0.0, 0.0)
    assert Guess.of(chain(), [], ()) == Guess()
    assert Guess.of(replace(offer, writers=()), [0.9] * 6, (0,)) == Guess(num_given=2.0)
    deep = chain(*["suffix"] * 40)
    assert len(Guess.of(deep, [0.9] * 40, range(40)).chances) == len(Guess().chances), "deeper ones are not considered"


def test_a_round_counts_as_often_as_a_schedule_needs_for_the_text_that_it_covered():
    """Beside, every round gave six tokens; at rest, half of this text takes several times as many rounds."""

    def told_of(*given: float, together: int = 1) -> Forecast:
        told = forecast()
        rich, poor = Guess((0.9,) * 6 + (0.0,) * 10, 6), Guess()
        kinds = [rich] * together + [poor] * together
        amounts = [amount for amount in given for _ in range(together)]
        told._guesses = [replace(guess, num_given=n) for guess, n in zip(kinds * 2, amounts * 2, strict=True)]
        told.has_writers = True
        return told

    expected, covered, alone = (
        told_of(*given).tokens_per_s("off", 1) for given in ((6.4, 1.0), (6.4, 2.0), (1.0, 1.0))
    )
    assert covered < 0.85 * expected
    assert alone < expected, "the rich ones gave less, so they are fewer"
    assert told_of(6.4, 200.0).tokens_per_s("off", 1) == covered, "twice at most: one lucky round is not the text"
    slow = told_of(3.2, 2.0).tokens_per_s("off", 1)
    pairs = [told_of(*given, together=2).tokens_per_s("off", 2) for given in ((6.4, 1.0), (3.2, 2.0))]
    assert pairs[1] / pairs[0] == pytest.approx(slow / expected, rel=0.05)
    mixed = [told_of(*given).tokens_per_s("off", 2) for given in ((6.4, 1.0), (6.4, 2.0))]
    assert mixed[0] == pytest.approx(mixed[1]), "rounds of one rich and one poor text are alike"


def see_passes(told: Forecast, arm: Arm, factor: float, num_rounds: int) -> None:
    """Let a forecast see passes that take so many times as long as was measured at start."""
    view = RoundView([make_request(0)], num_prompt_tokens=0, num_context_rows=100, takes_turns=arm == "turns")
    busy_s = factor * told.stations[arm].target.seconds(4, 1, 100)
    for _ in range(num_rounds):
        told.observe(arm, 1, Outcome(view, StepResult(num_tokens=4, busy_s=busy_s), busy_s, 1, 0, 0.0), [])


def test_a_machine_that_recovers_is_as_fast_for_the_schedule_that_met_its_slow_moment():
    told = forecast()
    at_start = told.tokens_per_s("turns", 1)
    see_passes(told, "turns", 2.0, 40)
    slow = told.tokens_per_s("turns", 1)
    see_passes(told, "beside", 2.0, 40)
    assert told.tokens_per_s("turns", 1) == pytest.approx(slow, rel=0.05), "the machine is as slow as before"
    see_passes(told, "beside", 1.0, 100)
    assert slow < 0.7 * at_start
    assert told.tokens_per_s("turns", 1) == pytest.approx(at_start, rel=0.1)


def see_drafts_beside(told: Forecast, factor: float, drafter_factor: float, num_rounds: int) -> None:
    """Let a forecast see rounds whose passes take so many times as long as was measured at start."""
    view = RoundView([make_request(0)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
    station = told.stations["beside"]
    assert station.drafter is not None
    busy_s, draft_s = factor * station.target.seconds(4, 1, 100), drafter_factor * station.drafter.seconds(1, 1, 100)
    for _ in range(num_rounds):
        told.observe("beside", 1, Outcome(view, StepResult(num_tokens=4, busy_s=busy_s), busy_s, 1, 5, 5 * draft_s), [])


def test_its_drafter_is_as_fast_as_before_too():
    told = forecast()
    at_start = told.draft_s("beside", 1, 1)
    see_drafts_beside(told, 2.0, 2.0, 40)
    assert told.draft_s("beside", 1, 1) == pytest.approx(2 * at_start, rel=0.1)
    see_passes(told, "turns", 2.0, 40)
    see_passes(told, "turns", 1.0, 100)
    assert told.draft_s("beside", 1, 1) == pytest.approx(at_start, rel=0.1)


def test_what_makes_one_schedule_slow_from_its_first_pass_on_is_not_the_machine():
    told = forecast()
    see_passes(told, "turns", 1.0, 40)
    before = told.tokens_per_s("turns", 1)
    see_passes(told, "beside", 1.0, 2)
    see_passes(told, "beside", 2.0, 200)
    assert told.tokens_per_s("turns", 1) == pytest.approx(before, rel=0.1)


def test_what_a_schedule_costs_beside_another_is_learnt_again_whenever_it_is_used():
    told = forecast()
    for arm in ("turns", "beside"):
        see_passes(told, arm, 1.0, 40)
    beside = told.tokens_per_s("beside", 1)
    see_passes(told, "turns", 1.4, 40)
    assert told.tokens_per_s("beside", 1) == pytest.approx(beside, rel=0.1), "the machine passed for slower"
    turns = told.tokens_per_s("turns", 1)
    see_passes(told, "beside", 1.0, 40)
    assert told.tokens_per_s("turns", 1) == pytest.approx(turns, rel=0.1), "the machine passed for faster again"


def test_what_a_draft_costs_is_learnt_again_soon_by_a_drafter_that_is_back():
    told = forecast()
    at_start = told.draft_s("beside", 1, 1)
    see_drafts_beside(told, 1.0, 1.0, 40)
    see_passes(told, "turns", 1.0, 40)
    see_drafts_beside(told, 1.0, 2.0, 4)
    assert 1.35 * at_start < told.draft_s("beside", 1, 1) < 2 * at_start


def test_a_drafter_at_rest_promises_what_the_other_writers_get_accepted():
    told = forecast()
    before = {arm: told.tokens_per_s(arm, 1) for arm in told.stations}
    assert before["off"] == max(before["off"], 1 / (7e-3 + 4e-4)), "plain decoding, before anything was seen"
    see(told, chain(*["beam+suffix"] * 6), 1.0, 200)
    assert told.has_writers
    assert told.tokens_per_s("off", 1) > 5 * before["off"], "seven tokens a pass that is a little longer"
    assert told.tokens_per_s("turns", 1) > before["turns"], "who has candidates does not wait for the drafter"


def test_candidates_of_the_drafter_alone_promise_nothing_while_it_rests():
    told = forecast()
    before = told.tokens_per_s("off", 1)
    see(told, chain(*["beam"] * 6), 1.0, 200)
    assert told.tokens_per_s("off", 1) == pytest.approx(before, rel=0.02)


def test_what_other_writers_promised_is_forgotten_when_they_promise_less():
    told = forecast()
    see(told, chain(*["suffix"] * 4), 1.0, 200)
    good = told.tokens_per_s("off", 1)
    see(told, chain(*["suffix"] * 4), 0.0, 30)
    assert told.tokens_per_s("off", 1) < 0.4 * good


def test_a_drafter_that_agrees_more_promises_more():
    told = forecast()
    see(told, Candidates.none(), 0.0, 200, num_agreed=0)
    low = told.tokens_per_s("beside", 1)
    assert told.agreement < 0.1
    see(told, Candidates.none(), 0.0, 300, num_agreed=1)
    assert told.agreement > 0.9
    assert told.tokens_per_s("beside", 1) > 2 * low
    assert told.tokens_per_s("beside", 1, agreement=0.0) < low * 1.2


def test_beside_the_target_no_drafter_gives_more_tokens_than_it_makes_layers():
    quick, slow = forecast(cost(1e-3, 0.0)), forecast(cost(9e-3, 0.0))
    for told in (quick, slow):
        see(told, Candidates.none(), 0.0, 300, num_agreed=1)
    assert slow.tokens_per_s("beside", 1) < 1.3 / 9e-3
    assert quick.tokens_per_s("beside", 1) > 3 * slow.tokens_per_s("beside", 1)


def test_a_drafter_that_costs_nothing_is_no_division_by_zero():
    assert forecast(PassCost(((1, 0.0), (2, 0.0)))).tokens_per_s("beside", 1) > 0


def test_stations_given_later_than_the_forecast_do_not_change_it():
    stations = dict(forecast().stations)
    told = Forecast(stations, DraftSettings(), frozenset())
    stations["off"] = replace(stations["off"], target=cost(1.0, 1.0))
    assert told.tokens_per_s("off", 1) > 100


def test_a_new_text_is_expected_to_agree_as_texts_usually_do():
    told = forecast()
    see(told, Candidates.none(), 0.0, 400, num_agreed=1)
    see(told, Candidates.none(), 0.0, 40, num_agreed=0)
    assert told.agreement < 0.5, "this text is another kind"
    view = RoundView([make_request(1)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
    told.observe("off", 1, Outcome(view, StepResult(num_tokens=1, busy_s=7e-3), 0.01, 1, 0, 0.0), [])
    usual = told.agreement
    assert usual > 0.75
    for _ in range(5):
        view = RoundView([make_request(1)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
        missed = StepResult(verified=[Verified(1, Candidates.none(), (), True, 1, 0)], num_tokens=1, busy_s=7e-3)
        told.observe("off", 1, Outcome(view, missed, 0.01, 1, 0, 0.0), [Guess()])
    assert told.agreement > 0.75 * usual, "answers begin harder than they go on"


def test_every_compared_candidate_tells_of_the_drafter():
    told = forecast()
    verified = [Verified(0, Candidates.none(), (), True, 5, 4)]
    view = RoundView([make_request(0)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
    for _ in range(300):
        result = StepResult(verified=verified, num_tokens=1, busy_s=7e-3)
        told.observe("off", 1, Outcome(view, result, 0.01, 1, 0, 0.0), [Guess()])
    assert told.agreement == pytest.approx(0.8, abs=0.01)


def test_what_a_few_rounds_showed_is_told_once_and_says_what_they_promised():
    told = forecast()
    see(told, chain(*["suffix"] * 4), 0.0, 300, num_agreed=0)
    told.take_lately()
    usual = {arm: told.tokens_per_s(arm, 1) for arm in told.stations}
    see(told, chain(*["suffix"] * 4), 1.0, 10, num_agreed=1, num_accepted=4)
    seen = told.take_lately()
    assert (seen.num_agreed, seen.num_compared) == (10, 10)
    assert seen.guesses == [Guess.of(chain(*["suffix"] * 4), [1.0] * 4, range(4))] * 10
    assert told.tokens_per_s("off", 1, seen=seen) > 3 * usual["off"], "five tokens a pass in these rounds"
    assert told.tokens_per_s("beside", 1, seen=seen) > 1.5 * usual["beside"]
    agreeing, missing = Acceptance(30, 30, [Guess()] * 10), Acceptance(0, 30, [Guess()] * 10)
    assert told.tokens_per_s("beside", 1, seen=agreeing) > 1.5 * told.tokens_per_s("beside", 1, seen=missing)
    assert told.take_lately() == Acceptance()
    assert told.tokens_per_s("off", 1, seen=Acceptance()) == told.tokens_per_s("off", 1), "no round, no news"


@pytest.mark.parametrize("arm", ["beside", "turns", "off"])
def test_rounds_are_judged_by_what_came_of_others_candidates_and_not_by_what_they_promised(arm):
    told = forecast(cost(2e-3, 5e-5))
    see(told, chain(*["suffix"] * 4), 0.8, 300)
    promised = told.tokens_per_s(arm, 1)
    told.take_lately()
    see(told, chain(*["suffix"] * 4), 0.8, 10)
    unlucky = told.tokens_per_s(arm, 1, seen=told.take_lately())
    see(told, chain(*["suffix"] * 4), 0.8, 10, num_accepted=4)
    lucky = told.tokens_per_s(arm, 1, seen=told.take_lately())
    assert unlucky < 0.8 * promised < 1.1 * promised < lucky


def test_a_turn_that_did_not_draft_where_others_promised_much_is_not_judged_as_if_it_had():
    told = forecast(cost(1.4e-3, 5e-5))
    for _ in range(100):  # the drafter agrees
        see(told, chain(*["suffix"] * 4), 0.95, 1, num_agreed=1)
    told.take_lately()
    see(told, chain(*["suffix"] * 4), 0.95, 10)
    seen = told.take_lately()
    assert told.tokens_per_s("turns", 1, seen=seen) == told.tokens_per_s("off", 1, seen=seen)


def test_what_nobody_takes_does_not_pile_up():
    told = forecast()
    see(told, Candidates.none(), 0.0, 3000, num_agreed=1)
    seen = told.take_lately()
    assert len(seen.guesses) == 1024
    assert seen.num_compared == 3000


def test_what_made_drafting_dearer_under_one_schedule_is_expected_under_another_until_it_was_used():
    told = forecast()
    before_s = told.draft_s("turns", 1, 2)
    view = RoundView([make_request(0)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
    for _ in range(50):
        told.observe(
            "beside", 2, Outcome(view, StepResult(num_tokens=1, busy_s=1e-2), 0.01, 1, 4, 4 * 1.8 * before_s), []
        )
    assert told.draft_s("beside", 1, 2) == pytest.approx(1.8 * before_s, rel=0.02)
    assert told.draft_s("turns", 1, 2) == pytest.approx(1.8 * before_s, rel=0.02)
    for _ in range(2):
        turn(told, before_s)
    assert told.draft_s("turns", 1, 2) == pytest.approx(before_s, rel=0.02)


def turn(told: Forecast, draft_s: float, *, arm: Arm = "turns", num_passes: int = 2, num_unread: int = 0) -> None:
    """Observe a round in turns whose drafter passes took so long."""
    view = RoundView([make_request(0)], num_prompt_tokens=0, num_context_rows=100, takes_turns=True)
    drafted = replace(view, num_passes=num_passes, waited_s=num_passes * draft_s, num_unread=num_unread)
    told.observe(arm, 2, Outcome(drafted, StepResult(num_tokens=1, busy_s=7e-3), 0.01, 1, 0, 0.0), [])


def test_a_drafter_that_takes_over_and_reads_the_text_is_not_taken_for_slow():
    told = forecast()
    before_s = told.draft_s("turns", 1, 2)
    turn(told, before_s, num_passes=0)
    turn(told, 9 * before_s)  # it reads the text
    turn(told, before_s)
    turn(told, 9 * before_s, num_unread=1)
    turn(told, before_s, arm="beside", num_passes=0)
    turn(told, before_s, num_passes=0)
    turn(told, 9 * before_s)
    turn(told, before_s)
    assert told.draft_s("turns", 1, 2) == pytest.approx(before_s, rel=0.01)


def test_what_a_drafter_has_missed_while_it_rested_is_part_of_its_price():
    told = forecast()
    before_s = told.draft_s("turns", 1, 2)
    for _ in range(99):
        turn(told, before_s, num_passes=0)
        turn(told, 1.5 * before_s)
    assert told.draft_s("turns", 1, 2) == pytest.approx(1.5 * before_s, rel=0.05)


def test_a_layer_that_others_reach_with_half_a_chance_costs_a_turn_all_the_same():
    def turns(offer: Candidates) -> float:
        told = forecast(cost(1e-3, 5e-5))
        for idx in range(400):  # the drafter is right 9 times in 10
            see(told, offer, 0.5, 1, num_agreed=idx % 10 > 0)
        return told.tokens_per_s("turns", 1)

    assert turns(chain(*["suffix"] * 4)) == pytest.approx(turns(chain(*["beam"] * 4)), rel=0.04)


def test_a_turn_drafts_only_in_rounds_in_which_others_promise_little():
    def turns(chances: tuple[float, ...]) -> float:
        told = forecast(cost(1e-3, 5e-5))
        for idx in range(400):
            see(told, chain(*["suffix"] * 4), chances[idx % len(chances)], 1, num_agreed=idx % 10 > 0)
        return told.tokens_per_s("turns", 1)

    assert turns((1.0, 0.0)) > 1.15 * turns((0.5, 0.5)), "the same on average, but known before each round"


def test_a_batch_shares_the_pass_of_its_round():
    def off(num_requests: int) -> float:
        told = forecast()
        for idx in range(64):  # in each round one of two requests has candidates
            see(told, chain(*["suffix"] * 8), float(idx % 2), 1)
        return told.tokens_per_s("off", num_requests)

    assert off(2) == pytest.approx(2 * (1 + 4) / (7e-3 + 17 * 1e-4 + 3e-4 + 2e-4), rel=0.02)


def test_what_was_predicted_for_one_batch_size_does_not_change_what_is_predicted_for_another():
    told, asked_before = forecast(), forecast()
    for idx in range(64):
        for one in (told, asked_before):
            see(one, chain(*["suffix"] * 8), float(idx % 2), 1, num_accepted=8 * (idx % 2))
    asked_before.tokens_per_s("turns", 1)
    assert asked_before.tokens_per_s("turns", 2) == told.tokens_per_s("turns", 2)


def test_a_batch_is_judged_by_what_came_true_in_each_of_its_requests():
    told = forecast()
    for idx in range(64):  # in each round the candidates of one of two requests come true
        see(told, chain(*["suffix"] * 8), 0.5, 1, num_accepted=8 * (idx % 2))
    judged = told.tokens_per_s("off", 2, seen=told.take_lately())
    assert judged == pytest.approx(2 * (1 + 4) / (7e-3 + 17 * 1e-4 + 3e-4 + 2e-4), rel=0.02)


@pytest.mark.parametrize("num_rounds", [4, 5])
def test_a_round_that_lost_some_of_its_requests_counts_for_those_that_it_has(num_rounds):
    told = forecast()
    see(told, chain(*["suffix"] * 8), 0.5, num_rounds, num_accepted=4)
    judged = told.tokens_per_s("off", 2, seen=told.take_lately())
    assert judged == pytest.approx(2 * (1 + 4) / (7e-3 + 17 * 1e-4 + 3e-4 + 2e-4), rel=0.02)


def test_an_unsure_drafter_loses_its_tree_more_often():
    def rate(agreement: float, lost: float, depth: int) -> float:
        missed = lost * (1 - agreement**depth)
        around_s = 4e-4 + 3.5e-4  # of any round, and of one with a drafter beside
        seconds = 1e-2 + depth * 1e-4 + around_s + missed * (1e-2 + around_s)
        return (sum(agreement**d for d in range(depth + 1)) + missed) / seconds

    told = forecast(cost(1e-6, 0.0))  # drafts as deep as one likes
    for agreement, lost in ((0.95, 0.16), (0.85, 0.48), (0.6, 1.0)):  # 3.2 times the disagreement, at most all
        best = max(rate(agreement, lost, depth) for depth in range(17))
        assert told.tokens_per_s("beside", 1, agreement=agreement) == pytest.approx(best, rel=0.005)


@pytest.mark.parametrize("writers", ["suffix", "beam+suffix"])
def test_what_others_have_verified_is_part_of_the_price_whoever_proposed_it_too(writers):
    told = forecast()
    see(told, chain(*(["beam"] * 12)), 0.0, 40)
    nothing = told.tokens_per_s("off", 1)
    see(told, chain(*([writers] * 12)), 0.0, 40)
    rows_s = 12e-4 / 1.1e-3  # of a pass of one token, 7 ms and a round's own time
    assert told.tokens_per_s("off", 1) / nothing == pytest.approx(1 / (1 + rows_s / 7), rel=0.03)


def test_a_layer_that_others_are_sure_of_is_no_further_row():
    def worth_of_drafting(chance: float) -> float:
        told = forecast(cost(1e-9, 0.0))
        told.stations["beside"] = Station(Home(), cost(1e-2, 5e-3), cost(1e-9, 0.0))  # where every row is dear
        see(told, chain("suffix"), chance, 40, num_agreed=1)
        return told.tokens_per_s("beside", 1)

    assert worth_of_drafting(1.0) > 1.1 * worth_of_drafting(0.0)


def test_a_drafter_that_lost_its_tree_leaves_a_round_to_the_others():
    told = forecast()
    see(told, chain(*(["suffix"] * 6)), 0.5, 40)
    assert told.tokens_per_s("beside", 1, 0.85) > 1.2 * told.tokens_per_s("beside", 1, 0.0)


def test_a_drafter_that_others_leave_behind_has_nothing_for_the_next_round():
    def rate(draft_s: float) -> float:
        told = forecast(cost(draft_s, 5e-5))
        for num_sure in (13, 0):
            see(told, chain(*(["suffix"] * num_sure)), 1.0, 8)
        return told.tokens_per_s("beside", 1, 0.95)

    assert rate(5e-4) > 1.25 * rate(1e-3), "rounds of 11 ms: it makes 9 layers, or 15"


@pytest.mark.parametrize(("agreement", "lost"), [(0.95, 0.16), (0.85, 0.48), (0.7, 0.96)])
def test_what_a_drafter_drafts_while_its_tree_is_lost_is_in_vain(agreement, lost):
    told = forecast(cost(5e-3, 0.0))  # too slow to fill the target's time
    token_s = 5e-3 + (1 - agreement) * lost * 1.05e-2  # a layer, and a target pass for each tree
    assert told.tokens_per_s("beside", 1, agreement=agreement) == pytest.approx(1 / token_s, rel=0.03)
    quick = forecast(cost(1e-5, 0.0))  # has a new tree at once
    assert quick.tokens_per_s("beside", 1, agreement=0.7) > 1.4 * told.tokens_per_s("beside", 1, agreement=0.7)


def test_a_prompt_token_costs_what_passes_have_cost_lately():
    told = forecast()
    at_start = told.prompt_token_s("off")
    assert at_start == pytest.approx(1e-4)
    result = StepResult(num_tokens=1, busy_s=2 * 7e-3)  # twice as long as measured at start
    view = RoundView([make_request(0)], num_prompt_tokens=0, num_context_rows=0, takes_turns=False)
    for _ in range(200):
        told.observe("off", 1, Outcome(view, result, 0.02, 1, 0, 0.0), [])
    assert told.prompt_token_s("off") == pytest.approx(2 * at_start, rel=0.05)
    assert told.prompt_token_s("beside") == pytest.approx(1e-4), "that schedule was not used"


def test_a_new_text_counts_more_than_many_old_ones():
    def after(num_requests: int) -> float:
        told = forecast()
        see(told, chain(*["suffix"] * 4), 1.0, 100)
        good = told.tokens_per_s("off", 1)
        result = StepResult(verified=[Verified(1, chain("suffix"), (), True, 0, 0)], num_tokens=2, busy_s=7.1e-3)
        requests = [make_request(i) for i in range(2 - num_requests, 2)]
        view = RoundView(requests, num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
        for _ in range(4):
            told.observe("off", 1, Outcome(view, result, 0.01, 1, 0, 0.0), [Guess()])
        assert told.num_texts == 2
        return told.tokens_per_s("off", 1) / good

    assert after(1) < after(2) < 1, "alone it replaces them, beside an old one by half"


def test_all_rounds_of_an_old_text_count_as_one_and_none_of_them_more_than_another():
    """What its last round showed alone says little: one round is there to copy from, and the next one is not."""

    def after(chances: list[float]) -> float:
        told = forecast()
        for chance in chances:
            see(told, chain(*["suffix"] * 4), chance, 1)
        result = StepResult(verified=[Verified(1, chain("suffix"), (), True, 0, 0)], num_tokens=2, busy_s=7.1e-3)
        view = RoundView([make_request(1)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
        told.observe("off", 1, Outcome(view, result, 0.01, 1, 0, 0.0), [Guess()])
        return told.tokens_per_s("off", 1)

    good, bad, mixed = [1.0] * 10, [0.0] * 10, [1.0, 0.0] * 5
    assert after(mixed) == pytest.approx(after(mixed[::-1]))
    assert after(bad) < after(mixed) < after(good)
    assert after(good) == pytest.approx(after([1.0]), rel=0.01)


def test_how_often_others_reach_beyond_a_drafter_is_counted_with_an_old_text_as_one_round():
    def beside_after(num_old_rounds: int) -> float:
        told, deep = forecast(), chain(*["suffix"] * 16)
        see(told, deep, 0.1, num_old_rounds)
        result = StepResult(verified=[Verified(1, deep, (), True, 0, 0)], num_tokens=17, busy_s=8.6e-3)
        view = RoundView([make_request(1)], num_prompt_tokens=0, num_context_rows=100, takes_turns=False)
        for _ in range(3):
            guess = Guess.of(deep, [0.6] * 16, tuple(range(16)))
            told.observe("off", 1, Outcome(view, result, 0.01, 1, 0, 0.0), [guess])
        return told.tokens_per_s("beside", 1, agreement=0.99)

    assert beside_after(12) == pytest.approx(beside_after(1), rel=0.01)
