"""Following grammars beside the target's passes: masks are computed in other threads while the model runs.

What a text may go on with is known once its last token is. So the mask after the text is begun as soon as a round has
committed it, those after candidates when their pass begins, and the pass takes those that are there. No pass waits long
for a mask: a candidate without one does not count, and a text without one sits out until it has it.

A grammar can also say what it forces. That is no part of any mask, and takes none of the time that a text may take.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from card.errors import GrammarError, in_words
from card.text.matcher import walk_order
from card.tree.masks import GrammarState, MaskRow, Path, TimeSpent

logger = logging.getLogger(__name__)

_NUM_QUICK = 2  # threads for quick grammars
_SLOW_S = 0.02  # of a step, from which a grammar is slow: it has another thread, and its candidates are not followed
_Key = tuple[int, ...]


class Lanes(Protocol):
    """Places where masks are computed."""

    @property
    def limit_s(self) -> float:
        """Most seconds of work for the grammar of one text, and for a mask to arrive."""

    @property
    def clock(self) -> Callable[[], float]:
        """Return the clock of a thread's work, in seconds."""

    def submit(self, job: Callable[[], None], *, is_slow: bool) -> None:
        """Have a job done. Jobs of slow grammars never hold up others."""


class Threads:
    """Lanes in threads."""

    def __init__(self, limit_s: float) -> None:
        """Begin without a thread; ``limit_s`` as of `Lanes`."""
        self.limit_s = limit_s
        self.clock: Callable[[], float] = time.thread_time
        self._quick = ThreadPoolExecutor(_NUM_QUICK, thread_name_prefix="card-masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="card-slow-masks")

    def submit(self, job: Callable[[], None], *, is_slow: bool) -> None:
        """Have a job done; once closed, never."""
        try:
            (self._slow if is_slow else self._quick).submit(job)
        except RuntimeError:  # closed, or the process ends
            return

    def close(self) -> None:
        """Begin no further job. May be called twice."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Lanes in the caller's own thread: every mask is there when it is needed."""

    limit_s: float = 10.0
    clock: Callable[[], float] = field(default=time.thread_time)

    def submit(self, job: Callable[[], None], *, is_slow: bool) -> None:
        """Do a job."""
        job()


class Following:
    """The grammar of one text, as the masks of a `Shaping`. Its calls are those of one thread, and none blocks long."""

    def __init__(self, state: GrammarState, lanes: Lanes, *, foresees: bool = False) -> None:
        """Take a state at the beginning of its grammar, for this text alone; begin the first mask.

        Args:
            foresees: find out what the grammar forces too.
        """
        self._state, self._lanes, self._foresees = state, lanes, foresees
        self._changed = threading.Condition()  # guards all below
        self._rows: dict[_Key, MaskRow] = {}  # by path below the present text; another dict once it goes on
        self._unread: list[int] = []  # committed tokens that the state has not got
        self._wanted: deque[_Key] = deque([()])  # paths whose masks are to be computed
        self._is_working = False
        self._is_slow = False
        self._spent = TimeSpent(lanes.limit_s)
        self._error: GrammarError | None = None
        self._was_late = False  # a pass came to its end before the mask that it needed
        self._asked_at = time.monotonic()  # for the mask after the present text
        self._forced: dict[_Key, tuple[int, ...]] = {}  # by path below the present text
        self._foreseen: set[_Key] = {()} if foresees else set()  # paths for which this is found out
        self._last_s = 0.0  # of the last step of the text itself
        self._begin_work()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take committed tokens, and begin the mask that follows them; masks of candidates are dropped."""
        with self._changed:
            self._unread += token_ids
            self._rows, self._wanted = {}, deque([()])
            self._was_late, self._asked_at = False, time.monotonic()
            known, num_new = self._forced.get((), ()), len(token_ids)
            goes_on = len(known) > num_new and known[:num_new] == tuple(token_ids)
            self._forced = {(): known[num_new:]} if goes_on else {}
            self._foreseen = {()} if self._foresees else set()
        self._begin_work()

    def begin(self, paths: Sequence[Path]) -> None:
        """Begin the masks after these paths, but for those of a slow grammar."""
        with self._changed:
            if self._is_slow:
                return
            known = {*self._rows, *self._wanted}
            listed = [tuple(paths[idx]) for idx in walk_order(paths)]
            self._wanted += [path for path in listed if path not in known]
        self._begin_work()

    def settle(self, paths: Sequence[Path], seconds: float) -> float:
        """Wait for the masks of these paths, so long at most. Returns: the seconds that are left."""
        end = time.monotonic() + seconds
        wanted = [tuple(path) for path in paths]
        with self._changed:
            self._changed.wait_for(lambda: not self._is_working or all(path in self._rows for path in wanted), seconds)
        return max(0.0, end - time.monotonic())

    def has_now(self, path: Path, seconds: float) -> bool:
        """Return whether the mask after a path is there within so many seconds."""
        self.begin([path])
        self.settle([path], seconds)
        return tuple(path) in self._rows

    def row(self, path: Path) -> MaskRow | None:
        """Return the mask after a path; None while it is not there."""
        return self._rows.get(tuple(path))

    def num_known(self, paths: Sequence[Path]) -> int:
        """Return how many of the first of these paths have their masks.

        Raises: GrammarError if there will never be one after the text.
        """
        if () not in self._rows and self._error is not None:
            raise self._error
        return next((idx for idx, path in enumerate(paths) if tuple(path) not in self._rows), len(paths))

    def rows(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
        """Return the masks after these paths, which must be known."""
        return np.stack([self._rows[tuple(path)] for path in paths])

    def forced(self, path: Path, seconds: float) -> Sequence[int]:
        """Return the tokens that the grammar forces after a path; empty if none are known within so many seconds.

        A grammar whose steps take longer is not waited for.
        """
        key = tuple(path)
        with self._changed:
            if not self._foresees or self._is_slow or self._last_s > seconds:
                return self._forced.get(key, ())
            if key not in self._foreseen:
                self._foreseen.add(key)
                self._wanted.appendleft(key)
        self._begin_work()
        with self._changed:
            self._changed.wait_for(lambda: key in self._forced or not self._is_working, seconds)
            return self._forced.get(key, ())

    @property
    def takes_candidates(self) -> bool:
        """True if candidates are followed: a slow grammar has enough to do with the text."""
        return not self._is_slow

    @property
    def is_held_up(self) -> bool:
        """True if the text sits out until its mask is there."""
        if not self._was_late or () in self._rows or self._error is not None:
            return False
        if time.monotonic() - self._asked_at > self._lanes.limit_s:
            self._fail(GrammarError(f"the grammar gave no mask within {self._lanes.limit_s:g} s; use a simpler one"))
        return self._error is None

    def sit_out(self) -> None:
        """Take no part in passes until the mask after the text is there."""
        self._was_late = True

    def close(self) -> None:
        """Begin no further step."""
        with self._changed:
            self._wanted.clear()
            self._unread.clear()

    def _fail(self, error: GrammarError) -> None:
        with self._changed:
            self._error = self._error or error
            self._wanted.clear()

    def _begin_work(self) -> None:
        with self._changed:
            if self._is_working or not self._wanted or self._error is not None:
                return
            self._is_working = True
        self._lanes.submit(self._work, is_slow=self._is_slow)

    # ---- in another thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Compute what is wanted; a grammar that turns out slow goes on in the other lane."""
        was_slow = self._is_slow
        while True:
            with self._changed:
                if not self._wanted:
                    self._is_working = False
                    self._changed.notify_all()
                    return
                if self._is_slow and not was_slow:
                    break
                path, new_ids, rows = self._wanted.popleft(), self._unread, self._rows
                self._unread = []
            self._compute(path, new_ids, rows)
        self._lanes.submit(self._work, is_slow=True)

    def _compute(self, path: _Key, new_ids: Sequence[int], rows: dict[_Key, MaskRow]) -> None:
        started = self._lanes.clock()
        row: MaskRow | None = None
        error: GrammarError | None = None
        try:
            if new_ids:
                self._state.advance(new_ids)
            row = self._state.allowed([path])[0]
        except GrammarError as failure:
            error = failure
        except BaseException as failure:  # any error of the library ends this text alone
            error = GrammarError(f"the grammar cannot be followed: {in_words(failure)}; use a simpler one")
        seconds = self._lanes.clock() - started
        with self._changed:
            self._is_slow = seconds > _SLOW_S
            if not path:
                self._last_s = seconds
                error = error or self._over_limit(seconds)
            if error is None and row is not None:
                rows[path] = row
            elif not path:
                self._error = self._error or error
            if error is not None or self._is_slow:
                self._wanted = deque(one for one in self._wanted if not one)
            self._changed.notify_all()
            is_foreseen = path in self._foreseen and path not in self._forced
        if is_foreseen:
            is_quick = error is None and not self._is_slow
            is_forced = is_quick and row is not None and np.count_nonzero(row) == 1
            self._publish(path, self._forced_after(path) if is_forced else (), rows)

    def _forced_after(self, path: _Key) -> Sequence[int]:
        try:
            return self._state.forced(path)
        except BaseException as error:  # plain decoding does not ask, so no text may end by it
            logger.warning("what a grammar forces is not proposed: %s", in_words(error))
            self._foresees = False
            return ()

    def _publish(self, path: _Key, forced: Sequence[int], rows: dict[_Key, MaskRow]) -> None:
        """Note what is forced after a path below the text that ``rows`` are of, unless this has gone on."""
        with self._changed:
            if rows is self._rows:
                self._forced[path] = tuple(forced)
                self._changed.notify_all()

    def _over_limit(self, seconds: float) -> GrammarError | None:
        """Count a step of the text itself. Steps of candidates do not count: plain decoding would not have them."""
        try:
            self._spent.add(seconds)
        except GrammarError as error:
            return error
        return None
