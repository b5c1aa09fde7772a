"""Local writers are asked seldom where nothing of theirs is taken, and at once and for all where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from card.engine.offers import DRAFTER_BIT
from card.engine.policy.asking import Asking
from card.engine.request import Verified
from card.tree.nodes import NO_NODES, Nodes

MOST = 16
OTHERS = Nodes((5, 6), (-1, 0), (-0.1, -0.2), (1, 2), (2, 2))
DRAFTED = Nodes((5, 6), (-1, 0), (-0.1, -0.2), (1, 2), (DRAFTER_BIT, DRAFTER_BIT))


def observe(asking: Asking, verified: Sequence[Verified], *, seconds: float = 5e-3, row_s: float = 1e-4) -> None:
    """Show it a round of 5 ms, of a machine on which 800 tokens come of a second."""
    asking.observe(verified, seconds, rate=800.0, row_s=row_s)


def run(
    asking: Asking, request_ids: Iterable[int], num_rounds: int, *, offer: Nodes = OTHERS, accepted: tuple[int, ...]
) -> list[Counter[int]]:
    """Return the budgets above 0 of each round, by request; an answer to none is an empty offer."""
    ids, rounds = list(request_ids), []
    for _ in range(num_rounds):
        asking.begin()
        budgets = Counter({one: asking.budget(one, MOST) for one in ids})
        answers = {one: (offer, accepted) if budgets[one] else (NO_NODES, ()) for one in ids}
        if asking.was_asked:
            observe(asking, [Verified(one, *answers[one], True) for one in ids])
        rounds.append(+budgets)
    return rounds


def num_asked(rounds: Iterable[Counter[int]]) -> int:
    return sum(map(len, rounds))


def test_a_request_is_asked_for_everything_at_first_and_in_each_round_in_which_something_is_taken() -> None:
    assert run(Asking(), [7], 50, accepted=(0,)) == [Counter({7: MOST})] * 50


def test_where_nothing_is_taken_few_candidates_are_asked_for_again_and_again() -> None:
    for num_requests in (1, 6):
        later = run(Asking(), range(num_requests), 60, accepted=())[4:]
        assert all(0 < budget < MOST for one in later for budget in one.values())
        assert num_requests <= num_asked(later[-20:]), "nobody is given up"
        assert num_asked(later) <= 60 * num_requests / 2


def test_what_is_taken_is_followed_at_once_by_all_that_there_is() -> None:
    asking = Asking()
    run(asking, range(4), 40, accepted=())
    rounds = run(asking, range(4), 20, accepted=(0, 1))
    first = next(idx for idx, one in enumerate(rounds) if one)
    assert first < 10
    for request_id in range(4):
        when = next(idx for idx, one in enumerate(rounds) if request_id in one)
        assert all(one[request_id] == MOST for one in rounds[when + 1 :])


def test_what_the_draft_model_alone_gets_accepted_is_no_reason_to_ask_others() -> None:
    assert num_asked(run(Asking(), [0], 40, offer=DRAFTED, accepted=(0, 1))[4:]) <= 20


def test_a_candidate_that_a_writer_and_the_draft_model_propose_counts_for_the_writer() -> None:
    both = Nodes((5,), (-1,), (-0.1,), (1,), (DRAFTER_BIT | 2,))
    assert num_asked(run(Asking(), [0], 40, offer=both, accepted=(0,))) == 40


def test_what_a_grammar_gets_accepted_is_no_reason_to_ask_others() -> None:
    asking, num_asked_of = Asking(), Counter[bool]()
    forced = Nodes((5, 6), (-1, 0), (0.0, 0.0), (1, 2), (4, 4))
    for _ in range(40):
        asking.begin()
        num_asked_of[asking.budget(0, MOST) > 0] += 1
        if asking.was_asked:
            observe(asking, [Verified(0, forced, (0, 1), True, grammar_bit=4)])
    assert num_asked_of[True] <= 24


def test_of_many_requests_each_is_asked_for_no_more_often_than_one_alone() -> None:
    alone = num_asked(run(Asking(), [0], 200, accepted=()))
    for num_requests in (2, 8, 32):
        assert num_asked(run(Asking(), range(num_requests), 200, accepted=())) <= num_requests * alone


def test_requests_are_learnt_of_apart() -> None:
    asking, budgets = Asking(), list[tuple[int, int]]()
    for _ in range(30):
        asking.begin()
        budgets.append((asking.budget(0, MOST), asking.budget(1, MOST)))
        offers = [(OTHERS, (0,)), (OTHERS if budgets[-1][1] else NO_NODES, ())]
        observe(asking, [Verified(idx, *answer, True) for idx, answer in enumerate(offers)])
    assert all(copied == MOST for copied, _ in budgets)
    assert sum(new > 0 for _, new in budgets) <= 15 + 1


def test_a_request_that_is_over_is_forgotten() -> None:
    asking = Asking()
    run(asking, [0], 40, accepted=())
    run(asking, [1], 1, accepted=())
    asking.begin()
    assert asking.budget(0, MOST) == MOST


def test_a_round_in_which_nobody_was_asked_says_so() -> None:
    asking = Asking()
    asking.begin()
    assert not asking.was_asked
    asking.budget(0, MOST)
    assert asking.was_asked
    asking.begin()
    assert not asking.was_asked


def test_no_more_is_asked_for_than_there_is_room_for() -> None:
    asking = Asking()
    run(asking, [0], 10, accepted=())
    for _ in range(10):
        asking.begin()
        assert asking.budget(0, 2) <= 2


def test_what_costs_more_rows_than_it_brings_is_asked_for_seldom() -> None:
    for row_s, is_worth_it in ((1e-4, True), (4e-3, False)):
        asking, num_questions = Asking(), 0
        for _ in range(100):
            asking.begin()
            budget = asking.budget(0, MOST)
            num_questions += budget > 0
            answer = (OTHERS, (0,)) if budget else (NO_NODES, ())
            if asking.was_asked:
                observe(asking, [Verified(0, *answer, True)], row_s=row_s)
        assert (num_questions == 100) == is_worth_it, "two rows for a token"


def test_in_long_rounds_a_question_costs_nothing_that_counts() -> None:
    asking = Asking()
    for _ in range(50):
        asking.begin()
        assert asking.budget(0, MOST) > 0
        observe(asking, [Verified(0, NO_NODES, (), True)], seconds=1.0)
