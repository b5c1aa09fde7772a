"""Moves of KV rows: to more room when a text outgrows its own, to a file when memory is full, and back.

Without files, the rows of a paused request are dropped and computed again.

Source of the idea: SparseSpec, arXiv:2512.01278, which admits more than fits and moves rows out when memory is full.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from card.engine.sequence import Sequence
from card.errors import CapacityError, SettingsError, named
from card.models.protocol import LanguageModel, Movable, Recurrent
from card.models.rows.pool import SequencePool
from card.models.rows.row_store import RowStore, StoredRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Files:
    model: Movable
    store: RowStore

    def put(self, slot: int) -> StoredRows:
        """Store the rows of a sequence. Raises: CapacityError if there is no room for them."""
        return self.store.put(self.model.read_rows(slot))


@dataclass(frozen=True, slots=True)
class _Paused:
    is_long: bool  # see `SequencePool.pause`
    stored: StoredRows | None  # None: the rows were dropped


class RowMoves:
    """Moves the rows of the requests of one target within its pool and its store, if there is one."""

    def __init__(self, model: LanguageModel, pool: SequencePool, store: RowStore | None) -> None:
        """Move rows of this model. Raises: SettingsError if its rows cannot be moved."""
        self._model, self._pool = model, pool
        self._files = None if store is None else _Files(_movable(model), store)
        self._paused: dict[int, _Paused] = {}  # by request
        self.num_pauses = 0
        self.moved_bytes = 0  # that were written to files

    @property
    def has_store(self) -> bool:
        """True if the rows of paused requests are stored."""
        return self._files is not None

    @property
    def stored_bytes(self) -> int:
        """Size of the rows of paused requests, in files."""
        return 0 if self._files is None else self._files.store.used_bytes

    def grow(self, sequence: Sequence, num_rows: int) -> bool:
        """Give a running request room for so many rows. Returns: whether it has it; if not, nothing has changed."""
        try:
            sequence.slot = self._pool.grow(sequence.slot, num_rows)
        except CapacityError:
            return False
        return True

    def pause(self, sequence: Sequence, *, may_drop: bool) -> bool:
        """Move the rows of a running request to the store, to make room for others.

        Args:
            may_drop: if the store has no room either, drop the rows; they are computed again later.
        Returns: whether the room is free; if not, nothing has changed.
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
            logger.warning("the text of a paused request must be read again later: %s", error)
        self._paused[request_id] = _Paused(self._pool.pause(sequence.slot), stored)
        self.num_pauses += 1
        self.moved_bytes += 0 if stored is None else stored.num_bytes
        return True

    def resume(self, sequence: Sequence, num_rows: int) -> bool:
        """Bring the rows of a paused request back into room for ``num_rows``; unreadable ones are computed again.

        Returns: whether there was room.
        """
        paused = self._paused[sequence.request.request_id]
        if not self._pool.has_room(num_rows):
            return False
        try:
            sequence.slot = self._pool.resume(num_rows, is_long=paused.is_long)
        except CapacityError:
            return False  # the device has less memory than the pool may use
        sequence.num_rows = self._write_back(sequence, paused.stored)
        self.forget(sequence)
        self._pool.note(sequence.slot, sequence.request.pool_key(sequence.token_ids[: sequence.num_rows]))
        return True

    def forget(self, sequence: Sequence) -> bool:
        """Free the stored rows of a paused request. Returns: whether it was paused."""
        paused = self._paused.pop(sequence.request.request_id, None)
        if self._files is not None and paused is not None and paused.stored is not None:
            self._files.store.drop(paused.stored)
        return paused is not None

    def _write_back(self, sequence: Sequence, stored: StoredRows | None) -> int:
        """Return how many rows of the request were restored."""
        if stored is None or self._files is None:
            return 0
        try:
            self._files.model.write_rows(sequence.slot, self._files.store.read(stored))
        except CapacityError as error:
            logger.warning("the text of a paused request is read again: %s", error)
            return 0
        return sequence.num_rows


def _movable(model: LanguageModel) -> Movable:
    """Return the model if its rows can be moved. Raises: SettingsError if not."""
    if not isinstance(model, Movable) or isinstance(model, Recurrent):
        raise SettingsError(
            f"this target keeps a recurrent state, so its KV cannot be moved to files; leave {named('kv_offload')} out"
        )
    return model
