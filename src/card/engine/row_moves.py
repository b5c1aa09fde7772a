"""Moves of KV rows: to a larger place when a text outgrows what it was given, to a file when memory is full, and back.

Without files the rows of who gives its room away are dropped, and computed again.

Source of the idea: SparseSpec, arXiv:2512.01278, which admits more than fits and moves rows out when memory ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from card.engine.sequence import Sequence
from card.errors import CapacityError, SettingsError
from card.models.protocol import LanguageModel, Movable, Recurrent
from card.models.rows.pool import SequencePool
from card.models.rows.row_store import RowStore, StoredRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Files:
    model: Movable
    store: RowStore

    def put(self, slot: int) -> StoredRows:
        """Keep the rows of a sequence. Raises: CapacityError if there is no room for them."""
        return self.store.put(self.model.read_rows(slot))


@dataclass(frozen=True, slots=True)
class _Paused:
    is_long: bool  # see `SequencePool.pause`
    stored: StoredRows | None  # None: the rows were dropped


class RowMoves:
    """Moves the rows of the requests of one target within its pool and its store, if there is one."""

    def __init__(self, model: LanguageModel, pool: SequencePool, store: RowStore | None) -> None:
        """Serve a model. Raises: SettingsError if its rows cannot be moved."""
        self._model, self._pool = model, pool
        self._files = None if store is None else _Files(_movable(model), store)
        self._paused: dict[int, _Paused] = {}  # by request
        self.num_pauses = 0
        self.moved_bytes = 0  # that were written to files

    @property
    def has_store(self) -> bool:
        """True if rows of paused requests are kept."""
        return self._files is not None

    @property
    def stored_bytes(self) -> int:
        """Size of the rows of paused requests, in files."""
        return 0 if self._files is None else self._files.store.used_bytes

    def grow(self, sequence: Sequence, num_rows: int) -> bool:
        """Give a running request room for so many rows. Returns: whether there was any; if not, all is as before."""
        try:
            sequence.slot = self._pool.grow(sequence.slot, num_rows)
        except CapacityError:
            return False
        return True

    def pause(self, sequence: Sequence, *, may_drop: bool) -> bool:
        """Move the rows of a running request to the store, so that others have their room.

        Args:
            may_drop: if the store has no room either, drop the rows; they are computed again later.
        Returns: whether the room is free; if not, all is as before.
        """
        request_id = sequence.request.request_id
        self._model.keep(sequence.slot, sequence.num_rows)
        if sequence.self_draft is not None:
            sequence.self_draft.forget()
        stored: StoredRows | None = None
        try:
            stored = None if self._files is None else self._files.put(sequence.slot)
        except CapacityError as error:
            if not may_drop:
                logger.warning("a request waits for room, since no running one can be paused: %s", error)
                return False
            logger.warning("the text of a request that gives its room away will be read once more: %s", error)
        self._paused[request_id] = _Paused(self._pool.pause(sequence.slot), stored)
        self.num_pauses += 1
        self.moved_bytes += 0 if stored is None else stored.num_bytes
        return True

    def resume(self, sequence: Sequence, num_rows: int) -> bool:
        """Bring the rows of a paused request back into room for ``num_rows``; what cannot be read is computed again.

        Returns: whether there was room.
        """
        paused = self._paused[sequence.request.request_id]
        if not self._pool.has_room(num_rows):
            return False
        try:
            sequence.slot = self._pool.resume(num_rows, is_long=paused.is_long)
        except CapacityError:
            return False  # the device has less memory than the pool was promised
        sequence.num_rows = self._write_back(sequence, paused.stored)
        self.forget(sequence)
        self._pool.note(sequence.slot, sequence.request.pool_key(sequence.token_ids[: sequence.num_rows]))
        return True

    def forget(self, sequence: Sequence) -> bool:
        """Free what a paused request has in the store. Returns: whether it was paused."""
        paused = self._paused.pop(sequence.request.request_id, None)
        if self._files is not None and paused is not None and paused.stored is not None:
            self._files.store.drop(paused.stored)
        return paused is not None

    def _write_back(self, sequence: Sequence, stored: StoredRows | None) -> int:
        """Return how many rows the request has again."""
        if stored is None or self._files is None:
            return 0
        try:
            self._files.model.write_rows(sequence.slot, self._files.store.read(stored))
        except CapacityError as error:
            logger.warning("the text of a paused request is read once more: %s", error)
            return 0
        return sequence.num_rows


def _movable(model: LanguageModel) -> Movable:
    """Return a model whose rows can be moved. Raises: SettingsError for another one."""
    if not isinstance(model, Movable) or isinstance(model, Recurrent):
        raise SettingsError("the KV of this target cannot be moved to files, as it keeps a state; leave kv_offload out")
    return model
