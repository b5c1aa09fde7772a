"""Masks of grammars that are computed in other threads: what is there counts, and nobody waits for what is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.errors import TargetError
from card.text.following import AtOnce, Following, Threads
from card.tree.masks import TOKEN_LIMIT_S, Path
from tests.shaping import ToyGrammar

PATHS = [(), (1,), (1, 2), (2,), (2, 3), (4, 5, 6)]


class ByHand:
    """Lanes whose jobs are done when a test says so; its clock moves by what the grammar is told to take."""

    def __init__(self, limit_s: float = 10.0) -> None:
        self.limit_s = limit_s
        self.now = 0.0
        self.jobs: list[tuple[Callable[[], None], bool]] = []

    def clock(self) -> float:
        return self.now

    def submit(self, job: Callable[[], None], *, is_slow: bool) -> None:
        self.jobs.append((job, is_slow))

    def work(self) -> list[bool]:
        """Do all jobs; return of each whether it was in the slow lane."""
        lanes = []
        while self.jobs:
            job, is_slow = self.jobs.pop(0)
            lanes.append(is_slow)
            job()
        return lanes


class Costly(ToyGrammar):
    """A grammar whose steps take what `seconds_of` says of their path."""

    def __init__(self, lanes: ByHand, seconds_of: Callable[[Path], float]) -> None:
        super().__init__(30)
        self._lanes, self.seconds_of = lanes, seconds_of
        self.asked: list[Path] = []

    def allowed(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
        self.asked += paths
        self._lanes.now += sum(map(self.seconds_of, paths))
        return super().allowed(paths)


@given(steps=st.lists(st.tuples(st.lists(st.integers(0, 10), max_size=2), st.booleans()), max_size=6))
def test_masks_are_those_of_the_grammar_whenever_they_are_computed(steps: list[tuple[list[int], bool]]) -> None:
    lanes, text = ByHand(), list[int]()
    following = Following(ToyGrammar(30), lanes)
    for tokens, works_between in steps:
        kept = [token for token in tokens if ToyGrammar(30).has([*text, token])][:1]
        following.advance(kept)
        text += kept
        if works_between:
            lanes.work()
        following.begin(PATHS)
    lanes.work()
    following.begin(PATHS)
    lanes.work()
    alone = ToyGrammar(30)
    alone.advance(text)
    assert following.num_known(PATHS) == len(PATHS)
    assert np.array_equal(following.rows(PATHS), alone.allowed(PATHS))


def test_what_is_not_there_does_not_count_and_is_not_waited_for() -> None:
    lanes = ByHand()
    following = Following(ToyGrammar(30), lanes)
    assert following.num_known([()]) == 0
    assert not following.is_held_up, "no pass has needed it yet"
    following.sit_out()
    assert following.is_held_up
    lanes.work()
    assert not following.is_held_up
    following.begin(PATHS)
    assert following.num_known(PATHS) == 1
    assert following.settle(PATHS, 0.0) == 0.0
    lanes.work()
    assert following.num_known(PATHS) == len(PATHS)
    following.advance([3])
    assert following.row((1,)) is None, "it was of the text before"


def test_a_slow_grammar_has_a_lane_of_its_own_and_its_candidates_are_not_followed() -> None:
    lanes = ByHand()
    grammar = Costly(lanes, lambda path: 0.1)
    following = Following(grammar, lanes)
    assert lanes.work() == [False]
    assert not following.takes_candidates
    following.begin(PATHS)
    assert not lanes.jobs
    following.advance([1])
    assert lanes.work() == [True]
    assert following.num_known([()]) == 1
    grammar.seconds_of = lambda path: 0.0
    following.advance([3])
    assert lanes.work() == [True]
    assert following.takes_candidates, "it is quick again"


def test_too_long_a_step_or_too_many_end_the_text_in_one_line() -> None:
    lanes = ByHand()
    following = Following(Costly(lanes, lambda path: 2 * TOKEN_LIMIT_S), lanes)
    lanes.work()
    assert following.num_known([()]) == 1, "one long step may be a pause of the machine"
    following.advance([1])
    lanes.work()
    with pytest.raises(TargetError, match=r"^the grammar took 0.40 s for one token, and 0.2 s are allowed; use a"):
        following.num_known([()])
    lanes = ByHand(limit_s=1.0)
    following, num_tokens = Following(Costly(lanes, lambda path: 0.15), lanes), 0
    with pytest.raises(TargetError, match=r"^the grammar took more than 1 s for one text; use a simpler one"):
        while num_tokens < 20:
            lanes.work()
            following.num_known([()])
            following.advance([num_tokens % 2])
            num_tokens += 1
    assert num_tokens == 6


def test_what_candidates_cost_ends_no_text_that_plain_decoding_would_finish() -> None:
    lanes = ByHand(limit_s=1.0)
    grammar = Costly(lanes, lambda path: 5.0 if path else 0.0)
    following = Following(grammar, lanes)
    lanes.work()
    following.begin(PATHS)
    lanes.work()
    assert following.num_known(PATHS) == 2, "the first of them was costly, and the others were left"
    assert len(grammar.asked) == 2
    following.advance([1])
    lanes.work()
    assert following.num_known([()]) == 1


def test_whatever_the_library_raises_costs_this_text_alone() -> None:
    class Panic(BaseException):
        """As the library's, which no `except Exception` sees."""

    class Broken(ToyGrammar):
        def allowed(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
            raise Panic("index out of bounds")

    following = Following(Broken(3), AtOnce())
    with pytest.raises(TargetError, match="cannot be followed: Panic: index out of bounds; use a simpler one"):
        following.num_known([()])


class Forcing(Costly):
    """A grammar that counts up, and is asked what that forces."""

    def follows(self, text: Sequence[int]) -> list[bool]:
        return [token == len(text) for token in range(12)]

    def forced(self, path: Path) -> Sequence[int]:
        self.asked.append(("forced", *path))
        return super().forced(path)


def test_what_is_forced_is_known_once_its_mask_is_and_is_kept_while_the_text_keeps_to_it() -> None:
    lanes = ByHand()
    grammar = Forcing(lanes, lambda path: 0.0)
    following = Following(grammar, lanes, foresees=True)
    assert not following.forced((), 0.0), "nobody has worked yet"
    lanes.work()
    assert list(following.forced((), 0.0)) == [*range(11)]
    following.advance([0, 1])
    assert list(following.forced((), 0.0)) == [*range(2, 11)], "without any work"
    assert not following.forced([2, 3], 0.0)
    lanes.work()
    assert list(following.forced([2, 3], 0.0)) == [*range(4, 11)]
    assert following.num_known([(), (2, 3)]) == 2, "the mask there serves the pass"
    assert [one for one in grammar.asked if "forced" in one] == [("forced",), ("forced", 2, 3)]
    following.advance([*range(2, 11)])
    assert not following.forced((), 0.0)
    lanes.work()
    assert not following.forced((), 0.0), "only the end follows"


def test_what_was_forced_in_a_text_that_has_gone_on_is_dropped() -> None:
    lanes = ByHand()
    following = Following(ToyGrammar(30), lanes, foresees=True)

    class Meanwhile(Forcing):
        def forced(self, path: Path) -> Sequence[int]:
            following.advance([0])
            return super().forced(path)

    following = Following(Meanwhile(lanes, lambda path: 0.0), lanes, foresees=True)
    lanes.jobs[1][0]()
    assert not following.forced((), 0.0)


def test_what_slow_grammars_force_is_not_asked_for_and_takes_none_of_the_texts_time() -> None:
    lanes = ByHand(limit_s=0.1)

    class Slow(Forcing):
        def forced(self, path: Path) -> Sequence[int]:
            lanes.now += 10.0
            return super().forced(path)

    quick = Following(Slow(lanes, lambda path: 0.001), lanes, foresees=True)
    lanes.work()
    started = time.monotonic()
    assert not quick.forced([0], 0.0005), "its steps take longer than the caller would wait"
    assert time.monotonic() - started < 0.0005 * 100 and not lanes.jobs
    assert quick.num_known([()]) == 1, "plain decoding would not have asked"
    slow = Slow(lanes, lambda path: 0.03)
    following = Following(slow, lanes, foresees=True)
    lanes.work()
    assert not following.forced((), 1.0) and ("forced",) not in slow.asked


def test_a_grammar_is_asked_for_what_it_forces_only_where_somebody_wants_it() -> None:
    lanes = ByHand()
    grammar = Forcing(lanes, lambda path: 0.0)
    following = Following(grammar, lanes)
    lanes.work()
    assert not following.forced((), 0.0) and grammar.asked == [()]


def test_a_mask_that_never_comes_ends_the_text() -> None:
    following = Following(ToyGrammar(3), ByHand(limit_s=0.01))
    following.sit_out()
    following.settle([()], 0.02)
    assert not following.is_held_up
    with pytest.raises(TargetError, match=r"gave no mask within 0\.01 s"):
        following.num_known([()])


def test_threads_compute_masks_beside_whoever_asks_and_slow_ones_hold_up_no_others() -> None:
    may_go_on, lanes = threading.Event(), Threads(10.0)

    class Slow(ToyGrammar):
        def allowed(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
            if self._text:
                assert may_go_on.wait(60.0)
            busy_until = time.thread_time() + 0.03
            while time.thread_time() < busy_until:
                pass
            return super().allowed(paths)

    slow = [Following(Slow(3), lanes) for _ in range(4)]
    for one in slow:
        assert one.settle([()], 60.0) > 0
        one.advance([1])
    quick = Following(ToyGrammar(3), lanes)
    assert quick.settle([()], 60.0) > 0
    assert [one.num_known([()]) for one in (*slow, quick)] == [0, 0, 0, 0, 1]
    may_go_on.set()
    assert all(one.settle([()], 60.0) > 0 for one in slow)
    assert [one.num_known([()]) for one in slow] == [1, 1, 1, 1]
    lanes.close()
    quick.advance([1])
    assert quick.settle([()], 0.01) == 0.0, "once closed, nothing is begun"
