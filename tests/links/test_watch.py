"""Silence and back-off under a clock of the test's own."""

from __future__ import annotations

import pytest

from card.links.zmq_link import FIRST_BACKOFF_S, MAX_BACKOFF_S, STABLE_AFTER_S, Watch


def watch() -> Watch:
    return Watch(start_timeout_s=10.0, silence_timeout_s=4.0)


def begun(now: float = 0.0) -> Watch:
    made = watch()
    made.begin(now)
    made.hear(now)
    return made


def test_before_the_first_start_nothing_is_to_be_done() -> None:
    assert watch().advise(5.0) == "nothing"
    assert (watch().status.state, watch().status.num_restarts) == ("down", 0)


def test_a_drafter_that_is_not_ready_in_time_is_given_up() -> None:
    made = watch()
    made.begin(0.0)
    assert made.advise(10.0) == "nothing"
    assert made.advise(10.1) == "give up"
    assert made.complaint(10.1) == "not ready after 10 s"
    assert not made.is_listening


def test_a_silent_drafter_is_pinged_then_degraded_then_given_up() -> None:
    made = begun()
    assert made.advise(2.0) == "nothing"
    assert made.advise(2.1) == "ping"
    assert made.advise(4.0) == "nothing"
    assert made.state == "up"
    assert made.advise(4.2) == "nothing"
    assert str(made.status) == "degraded: silent for 4.2 s"
    assert made.is_listening
    assert made.advise(6.2) == "give up"


def test_a_patient_link_pings_often_enough_for_a_server() -> None:
    made = Watch(start_timeout_s=10.0, silence_timeout_s=1000.0)
    made.begin(0.0)
    made.hear(0.0)
    assert made.advise(10.1) == "ping"
    assert made.advise(500.0) == "nothing"
    assert made.state == "up"


def test_any_word_makes_it_well_again() -> None:
    made = begun()
    made.advise(2.1)
    made.advise(4.2)
    made.hear(5.0)
    assert str(made.status) == "up"
    assert made.advise(7.0) == "nothing"
    assert made.advise(7.1) == "ping"


def test_the_pause_doubles_up_to_a_limit_and_is_short_again_after_a_long_life() -> None:
    made, now, pauses = begun(), 0.0, []
    for _ in range(10):
        made.fail(now, "it died", MAX_BACKOFF_S)
        start = now
        while made.advise(now) != "start":
            now += 0.01
        pauses.append(now - start)
        made.begin(now)
    expected = [min(FIRST_BACKOFF_S * 2**i, MAX_BACKOFF_S) for i in range(10)]
    assert pauses == pytest.approx(expected, abs=0.02)
    assert made.status.num_restarts == 10
    made.fail(now + STABLE_AFTER_S + 1, "it died", MAX_BACKOFF_S)
    assert made.advise(now + STABLE_AFTER_S + 1 + FIRST_BACKOFF_S) == "start"


def test_a_drafter_that_is_forgiven_starts_again_at_once() -> None:
    made = begun()
    made.fail(1.0, "nobody pinged", MAX_BACKOFF_S)
    assert made.advise(1.0) == "nothing"
    made.forgive()
    assert made.advise(1.0) == "start"


def test_after_the_end_nothing_starts_again() -> None:
    made = begun()
    made.fail(1.0, "it died", MAX_BACKOFF_S)
    made.end()
    assert made.advise(1000.0) == "nothing"
    assert str(made.status) == "down: closed"
