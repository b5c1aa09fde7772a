"""Clients take turns at a few threads."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from card.text.fair_queue import FairQueue, QueueTurn


def _turn(queue: FairQueue[int]) -> QueueTurn[int]:
    turn = queue.take()
    assert turn is not None
    return turn


def test_clients_take_turns_however_much_one_of_them_asks_for() -> None:
    queue = FairQueue[int](most_at_once=9)
    for item in range(5):
        queue.put("greedy", item)
    queue.put("a", 10)
    queue.put("b", 20)
    assert [_turn(queue).item for _ in range(7)] == [0, 10, 20, 1, 2, 3, 4]


def test_a_client_has_only_so_much_done_at_once() -> None:
    queue = FairQueue[int](most_at_once=1)
    for item in range(3):
        queue.put("greedy", item)
    first = _turn(queue)
    queue.put("modest", 10)
    assert _turn(queue).item == 10
    queue.done(first)
    assert _turn(queue).item == 1
    assert (queue.num_running, len(queue)) == (2, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40), st.integers(1, 3))
def test_all_that_is_put_and_not_taken_back_is_done_once(asked: list[tuple[str, bool]], most_at_once: int) -> None:
    queue, wanted, done = FairQueue[int](most_at_once), [], []
    for item, (client, is_taken_back) in enumerate(asked):
        queue.put(client, item)
        if is_taken_back:
            assert queue.remove(client, item)
            assert not queue.remove(client, item)
        else:
            wanted.append(item)
    for _ in wanted:
        turn = _turn(queue)
        done.append(turn.item)
        queue.done(turn)
    assert sorted(done) == wanted and not len(queue)


def test_whoever_waits_for_a_turn_is_told_that_there_are_no_more() -> None:
    queue = FairQueue[int](most_at_once=1)
    queue.put("a", 1)
    _turn(queue)
    queue.put("a", 2)
    found: list[object] = ["nothing yet"]
    thread = threading.Thread(target=lambda: found.append(queue.take()))
    thread.start()
    assert queue.close() == [2]
    thread.join(60)
    assert found == ["nothing yet", None]
