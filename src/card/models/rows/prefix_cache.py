"""`PrefixCache`: rows of long beginnings of texts outlive their process, so that a restart need not read them again.

A thread of low priority writes the rows while passes run. It takes no lock: it copies a block of rows, and then looks
whether the pool has moved any meanwhile. If so, it copies the block again. So it delays no pass.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from card.errors import ModelError
from card.models.protocol import Divisible, Stateful
from card.models.rows.parts import RowsPart
from card.models.rows.pool_entries import Entries, common_length
from card.models.rows.prefix_files import KeptBeginning, PrefixFiles, parts_of
from card.models.rows.row_tree import IntArray

T = TypeVar("T")
logger = logging.getLogger(__name__)

SHARED_TOKENS = 256  # a beginning that two texts have in common is kept from this length on
LONG_TOKENS = 1024  # and any other one from this length on, before its rows are dropped
WORTH_READING = 64  # tokens more than memory holds, from which on a file is read
_GROWTH = 1.25  # a beginning is written if it is so much longer than what files hold of it
_MOST_JOBS = 32  # that wait; later ones are dropped
CLOSE_S = 5.0  # for what is written at the end
_REST_S = 600.0  # after the disk was full
_LOOK_S = 0.001  # until the pool has moved its rows
_LOWEST = 19  # priority of a thread


class PrefixCache:
    """Decides which beginnings go to files, writes them there, and reads them back."""

    def __init__(self, model: Divisible, files: PrefixFiles) -> None:
        self._model, self._files = model, files
        self._has_states = isinstance(model, Stateful)  # which passes change, so that only what is retained stays
        self._source: Entries | None = None
        self._jobs: queue.Queue[tuple[IntArray, bool] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._rests_until = 0.0

    def watch(self, source: Entries) -> None:
        """Take rows from the sequences of a pool."""
        self._source = source

    def find(self, text: IntArray, *, is_long: bool, num_held: int) -> tuple[KeptBeginning, int] | None:
        """Return a file that holds more of a text than memory does, and how many of its rows are of use."""
        return self._files.find(text, is_long=is_long, more_than=num_held + WORTH_READING - 1)

    def read(self, kept: KeptBeginning, slot: int, num_rows: int) -> bool:
        """Read the first rows of a file into an empty sequence with room for them.

        Returns: whether it worked; if not, some rows may be there.
        """
        return self._files.read(kept, num_rows, functools.partial(self._model.append_part, slot))

    def note_shared(self, text: IntArray, *, is_long: bool) -> None:
        """Say that two texts have a beginning in common."""
        if len(text) >= SHARED_TOKENS:
            self._ask(text, is_long)

    def note_leaving(self, text: IntArray, *, is_long: bool) -> None:
        """Say that rows may soon be dropped."""
        if len(text) >= LONG_TOKENS:
            self._ask(text, is_long)

    def close(self) -> None:
        """Write what memory holds of long texts, the last used one first, for some seconds; then end the thread."""
        if self._source is not None:
            for entry in reversed(self._source.retained.values()):
                self.note_leaving(entry.text, is_long=entry.is_long)
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_S)
            self._is_ending = True
            self._thread.join(CLOSE_S)  # it ends with its block; a disk that hangs holds up no end of the process
            self._thread = None

    def _ask(self, text: IntArray, is_long: bool) -> None:
        """Have the rows of a text written. Placeholders of images are no tokens: only what is before them is kept."""
        outside = (text < 0) | (text >= self._model.vocab_size)
        text = text[: int(outside.argmax())] if outside.any() else text
        if (
            self._is_ending
            or len(text) < SHARED_TOKENS
            or self._jobs.qsize() >= _MOST_JOBS
            or time.monotonic() < self._rests_until
        ):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="card-prefixes", daemon=True)
            self._thread.start()
        self._jobs.put((text, is_long))

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        while (job := self._jobs.get()) is not None and not self._is_ending:
            try:
                self._write(*job)
            except OSError as error:
                self._rests_until = time.monotonic() + _REST_S
                logger.warning(
                    "beginnings of texts are not kept for %.0f minutes: %s", _REST_S / 60, error.strerror or error
                )
            except MemoryError:
                logger.warning("a beginning of %d tokens is not kept: there is no memory to copy it", len(job[0]))

    def _write(self, text: IntArray, is_long: bool) -> None:
        """Write the rows of a text, unless files hold most of it or its rows are gone. Raises: OSError."""
        if time.monotonic() < self._rests_until:
            return
        with contextlib.suppress(_Gone):
            text = text[: self._settled(functools.partial(self._num_separable, text, is_long))]
            longest = self._files.find(text, is_long=is_long)
            if len(text) < SHARED_TOKENS or (longest is not None and _GROWTH * longest[1] > len(text)):
                return
            with self._files.written(text, is_long=is_long) as add:
                if add is not None:
                    for part in parts_of(len(text)):
                        add(self._settled(functools.partial(self._part, text, is_long, part)))

    def _settled(self, look: Callable[[], T]) -> T:
        """Return what a look at the pool gives that nothing has moved in meanwhile. Raises: _Gone."""
        assert self._source is not None
        while not self._is_ending:
            version = self._source.version
            if version % 2 == 0:
                try:
                    seen = look()
                except (_Gone, ModelError):  # perhaps because rows were moved at this moment
                    if self._source.version == version:
                        break
                else:
                    if self._source.version == version:
                        return seen
            time.sleep(_LOOK_S)
        raise _Gone

    def _num_separable(self, text: IntArray, is_long: bool) -> int:
        """Return how much of a text a file can hold now; see `Divisible.separable_rows`."""
        return max((count for _, count in self._holders(text, is_long)), default=0)

    def _part(self, text: IntArray, is_long: bool, part: RowsPart) -> memoryview:
        """Return a copy of rows of a text, as bytes. Raises: _Gone if no sequence holds them any more; ModelError."""
        for slot, count in self._holders(text, is_long):
            if count == len(text):
                return self._model.read_part(slot, part).data
        raise _Gone

    def _holders(self, text: IntArray, is_long: bool) -> Iterator[tuple[int, int]]:
        """Yield the slots that hold the beginning of a text, and how much of it a file can take from them."""
        assert self._source is not None
        for entry in self._source.listed(with_running=not self._has_states):
            if entry.is_long == is_long and (count := common_length(entry.text, text)) >= SHARED_TOKENS:
                yield entry.slot, self._model.separable_rows(entry.slot, count)


class _Gone(Exception):
    """The rows are not in memory any more, or the thread is to end."""
