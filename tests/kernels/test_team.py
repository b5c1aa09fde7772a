"""Threads of a pass sleep without Python, and one call wakes all of them."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code
from card.machine.threads import integer_passes_on
from card.models.protocol import Extension
from card.models.runners import make_runner
from tests.reaching_in import team_of
from tests.tiny import tiny_llama
from tests.waiting import PATIENCE_S, until

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
if REASON is None:
    prepare_wake, change_and_wake = machine_code("waking").prepare_wake, machine_code("waking").change_and_wake
    sleep_until_changed, store_int = machine_code("waking").sleep_until_changed, machine_code("vectors").store_int
MANY = 64  # threads, of a machine that has as many cores
TEXT = list(range(3, 40))


def prepare_condition(wake: int) -> None:
    prepare_wake(wake)


def sleep_by_condition(wake: int, seen: int, heard: int) -> None:
    store_int(heard, sleep_until_changed(wake, seen, 0))


def wake_by_condition(wake: int, word: int) -> None:
    change_and_wake(wake, word, 1)


def runner_of_threads() -> Any:
    return make_runner(tiny_llama(64).eval(), max_model_len=64, max_tree_rows=0)


def logits(runner: Any, num_threads: int) -> np.ndarray:
    """Read a text in a new sequence by so many threads."""
    slot = runner.open()
    with integer_passes_on(num_threads):
        (found,) = runner.forward([Extension.of_text(slot, TEXT, first_logits=0)])
    runner.close(slot)
    return np.array(found)


def switches(thread_id: int) -> int:
    """Return how often a thread gave its core away by itself."""
    text = Path(f"/proc/self/task/{thread_id}/status").read_text("ascii")
    return int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def helpers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if "_serve" in one.name]


def test_a_pass_wakes_all_its_threads_with_one_call() -> None:
    runner = runner_of_threads()
    expected, team = logits(runner, 1), team_of(runner)
    assert team.num_wakes == 0, "one thread wakes nobody"
    for count in (1, 2, 3):
        assert np.array_equal(logits(runner, MANY), expected)
        assert team.num_wakes == count


def test_fewer_threads_than_there_are_change_no_bit_and_the_others_wait_for_their_next_pass() -> None:
    runner = runner_of_threads()
    expected = logits(runner, 1)
    for num_threads in (5, 2, 1, 3, 2, 5, 4, 5) * 5:
        assert np.array_equal(logits(runner, num_threads), expected)


def test_threads_sleep_between_passes() -> None:
    before = set(helpers())
    runner = runner_of_threads()
    logits(runner, 3)
    mine = [one.native_id for one in helpers() if one not in before]
    assert len(mine) == 2

    until(lambda: are_asleep(mine))
    counts = [switches(one) for one in mine if one is not None]
    threading.Event().wait(0.05)
    assert [switches(one) for one in mine if one is not None] == counts, "nothing woke them meanwhile"


def are_asleep(threads: list[int | None]) -> bool:
    states = [Path(f"/proc/self/task/{one}/stat").read_text("ascii").rsplit(")", 1)[1].split()[0] for one in threads]
    return set(states) <= {"S"}


def test_a_pass_of_two_threads_leaves_the_others_asleep() -> None:
    before = set(helpers())
    runner = runner_of_threads()
    logits(runner, 5)
    mine = [one.native_id for one in helpers() if one not in before]
    until(lambda: are_asleep(mine))
    counts = [switches(one) for one in mine if one is not None]
    for _ in range(5):
        logits(runner, 2)
    until(lambda: are_asleep(mine))
    woken = [switches(one) > count for one, count in zip(mine, counts, strict=True) if one is not None]
    assert sum(woken) == 1, "of four helpers"
    assert np.array_equal(logits(runner, 5), logits(runner, 1)), "they wake for a pass that has them"


def test_an_interrupt_while_a_thread_starts_costs_no_later_pass_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, start = runner_of_threads(), threading.Thread.start
    expected = logits(runner_of_threads(), 1)

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(runner, 3)
    monkeypatch.undo()
    for num_threads in (3, 4, 2, 4):
        assert np.array_equal(logits(runner, num_threads), expected)


def test_threads_end_with_their_decoder() -> None:
    before = set(helpers())
    runner = runner_of_threads()
    logits(runner, 4)
    mine = set(helpers()) - before
    assert len(mine) == 3
    del runner
    gc.collect()
    until(lambda: not any(one.is_alive() for one in mine))


def test_where_there_is_no_futex_a_condition_wakes_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code("waking"), "has_futex", lambda: False)
    entered = machine_code("vectors").entered
    prepare, sleep, wake = map(entered, (prepare_condition, sleep_by_condition, wake_by_condition))
    words, heard = np.zeros(machine_code("waking").WAKE_SIZE, np.int64), np.zeros(4, np.int64)
    prepare(words.ctypes.data)
    places = [heard[idx:].ctypes.data for idx in range(4)]
    sleepers = [threading.Thread(target=sleep, args=(words.ctypes.data, 0, place)) for place in places]
    for one in sleepers:
        one.start()
    wake(words.ctypes.data, 7)
    for one in sleepers:
        one.join(PATIENCE_S)
    assert heard.tolist() == [7] * 4
