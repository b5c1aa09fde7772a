"""A drafter reads a text when that pays, in pieces, and nothing is remembered of requests that are gone."""

from __future__ import annotations

import tracemalloc

import pytest

from card.config import SamplingParams
from card.engine.metrics import RequestStats
from card.engine.policy.unread import Unread
from card.engine.request import Request, Update
from tests.decoding import make_request

TOKEN_S = 1e-3  # in which the drafter reads a token


def asked(request_id: int, num_tokens: int, max_tokens: int = 500) -> Request:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    return make_request(request_id, prompt=(1,) * num_tokens, params=params)


def unread() -> Unread:
    return Unread(lambda num_tokens: TOKEN_S * num_tokens)


def wrote(
    unread: Unread, request: Request, num_tokens: int, *, num_rounds: int | None = None, is_over: bool = False
) -> None:
    """Show it an answer of so many tokens, in as many rounds if nothing else is said."""
    stats = RequestStats(num_new_tokens=num_tokens, target_passes=num_tokens if num_rounds is None else num_rounds)
    unread.observe([request], [Update(request.request_id, (1,), "stop" if is_over else None, stats)])


def test_reading_costs_what_was_not_read_and_of_a_long_text_its_ends() -> None:
    texts, short, long = unread(), asked(1, 100), asked(2, 9_000)
    assert texts.reading_s(short) == pytest.approx(0.1)
    assert 1.0 < texts.reading_s(long) < 1.6
    texts.begin([short], 1.0)
    assert texts.reading_s(short) == 0.0
    wrote(texts, short, 10)
    assert texts.reading_s(short) == 0.0, "a few tokens are read in passing"
    wrote(texts, short, 50)
    assert texts.reading_s(short) == pytest.approx(0.05)


def test_a_text_is_worth_reading_while_much_of_its_answer_is_to_come() -> None:
    texts, request = unread(), asked(1, 400)
    assert texts.worth([request], 5e-3) == [request]
    assert texts.worth([request], 1e-3) == []
    assert texts.worth([asked(2, 400, max_tokens=50)], 5e-3) == [], "it ends soon"
    for idx in range(100):
        wrote(texts, asked(10 + idx, 5), 20, is_over=True)
    assert texts.worth([request], 5e-3) == [], "answers are short here"
    wrote(texts, request, 300)
    assert texts.worth([request], 5e-3) == [request], "but this one is long already"


def test_an_answer_as_long_as_all_the_others_were_is_about_to_end() -> None:
    texts, request = unread(), asked(1, 100)
    wrote(texts, request, 65)
    assert texts.worth([request], 5e-3) == [request]
    for idx in range(16):
        wrote(texts, asked(10 + idx, 5), 60, is_over=True)
    wrote(texts, request, 65)
    assert texts.worth([request], 5e-3) == []
    wrote(texts, asked(30, 5), 2_000, is_over=True)
    assert texts.worth([request], 5e-3) == [request], "one of them was much longer"


def test_what_is_copied_makes_no_answer_worth_reading_as_drafts_cannot_save_it() -> None:
    for num_rounds, is_worth_it in ((400, True), (40, False)):
        texts, request = unread(), asked(1, 400)
        for idx in range(16):
            wrote(texts, asked(10 + idx, 5), 400, num_rounds=num_rounds, is_over=True)
        assert (texts.worth([request], 5e-3) == [request]) == is_worth_it
    wrote(texts, request, 300, num_rounds=30)
    assert texts.worth([request], 5e-3) == [], "it is long, and will take no more rounds than the others"


def test_texts_are_begun_as_far_as_the_time_allows_and_a_long_one_in_pieces() -> None:
    texts, requests = unread(), [asked(idx, size) for idx, size in enumerate((300, 40, 50, 900))]
    first = texts.begin(requests, 0.13)
    assert [one.request_id for one in first.requests] == [1, 2] and first.num_tokens == 90
    second = texts.begin(requests, 0.13)
    assert [one.request_id for one in second.requests] == [1, 2, 0]
    assert (second.num_tokens, second.leaves_rest) == (128, True)
    while texts.reading_s(requests[0]):
        last = texts.begin(requests[:1], 0.13)
    assert last.num_tokens == 300 - 2 * 128 and not last.leaves_rest


def test_of_a_request_that_ended_nothing_is_remembered() -> None:
    texts, request = unread(), asked(1, 30)
    texts.begin([request], 1.0)
    wrote(texts, request, 5)
    assert texts.num_tokens(request) == 5
    wrote(texts, request, 6, is_over=True)
    assert texts.num_tokens(request) == 30


def test_of_requests_that_were_aborted_little_is_remembered() -> None:
    texts = unread()
    tracemalloc.start()
    for idx in range(6_000):
        wrote(texts, request := asked(idx, 30), 5)
        texts.begin([request], 1.0)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 1_000_000
