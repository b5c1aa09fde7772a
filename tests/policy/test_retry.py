"""Second chances for drafting: soon at first, ever more rarely if they fail, and never given up."""

from __future__ import annotations

from card.policy.cost import DISCOUNT
from card.policy.retry import RETRY_ROUNDS, Retry
from card.policy.schedule import REVIEW_ROUNDS


def pauses(retry: Retry, num_tries: int, *, num_requests: int = 1, reading_rounds: float = 0.0) -> list[int]:
    """Return the rounds without a try before each of so many tries, none of which succeeds."""
    found: list[int] = []
    while len(found) < num_tries:
        idle = 0
        while retry.begin(num_requests, reading_rounds) or not retry.is_on:
            retry.observe(has_drafted=False)
            idle += 1
        found.append(idle)
        for _ in range(REVIEW_ROUNDS):
            assert retry.is_on
            retry.observe(has_drafted=True)
        assert not retry.is_on
    return found


def test_tries_come_soon_at_first_then_half_as_often_each_time_and_never_end():
    memory = 1 / (1 - DISCOUNT)
    found = pauses(Retry(), 9)
    assert found[:4] == [RETRY_ROUNDS, 2 * RETRY_ROUNDS, 4 * RETRY_ROUNDS, 8 * RETRY_ROUNDS]
    assert max(found) <= memory + 1, "a stuck state is left after a bounded number of rounds"


def test_a_batch_is_tried_less_often_as_few_of_its_rounds_say_as_much():
    assert pauses(Retry(), 1, num_requests=4) == [4 * RETRY_ROUNDS]
    assert max(pauses(Retry(), 3, num_requests=500)) <= 1 / (1 - DISCOUNT) + 1


def test_a_drafter_that_has_long_texts_to_read_first_is_tried_less_often():
    assert pauses(Retry(), 1, reading_rounds=3.0) == [4 * RETRY_ROUNDS]


def test_rounds_that_draft_need_no_try_and_make_the_next_one_come_sooner():
    retry = Retry()
    (*_, last) = pauses(retry, 4)
    for _ in range(last):
        retry.begin(1, 0.0)
        assert not retry.is_on
        retry.observe(has_drafted=True)
    assert pauses(retry, 1) == [last]
