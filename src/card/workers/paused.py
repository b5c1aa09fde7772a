"""Paused requests: their KV rows wait in files while others have their room."""

from __future__ import annotations

import logging

from card.errors import CapacityError, SettingsError
from card.models.pool import PausedSequence, SequencePool
from card.models.protocol import LanguageModel, Movable, Recurrent
from card.models.row_store import RowStore, StoredRows
from card.workers.sequence import Sequence

logger = logging.getLogger(__name__)


class PausedRequests:
    """Moves the rows of running requests to a store, and back."""

    def __init__(self, model: LanguageModel, pool: SequencePool, store: RowStore) -> None:
        """Begin with none. Raises: SettingsError if the model's rows cannot be moved."""
        if not isinstance(model, Movable) or isinstance(model, Recurrent):
            raise SettingsError(
                "the KV of this target cannot be moved to files, as it keeps a state; leave kv_offload out"
            )
        self._model, self._pool, self._store = model, pool, store
        self._stored: dict[int, tuple[PausedSequence, StoredRows]] = {}  # by request

    @property
    def used_bytes(self) -> int:
        """Size of the rows in files."""
        return self._store.used_bytes

    def pause(self, sequence: Sequence) -> bool:
        """Move the rows of a running request to the store, so that others have their room.

        Returns: whether they were moved; all is as before if the store has no room for them.
        """
        self._model.keep(sequence.slot, sequence.num_rows)
        if sequence.self_draft is not None:
            sequence.self_draft.forget()
        try:
            stored = self._store.put(self._model.read_rows(sequence.slot))
        except CapacityError as error:
            logger.warning("a request waits for room, since no running one can be paused: %s", error)
            return False
        self._stored[sequence.request.request_id] = self._pool.pause(sequence.slot), stored
        return True

    def resume(self, sequence: Sequence) -> bool:
        """Bring the rows of a paused request back; rows that cannot be read are computed again.

        Returns: whether there was room.
        """
        paused, stored = self._stored[sequence.request.request_id]
        if not self._pool.has_room(paused.num_rows):
            return False
        try:
            sequence.slot = self._pool.resume(paused)
        except CapacityError:
            return False  # the device has less memory than the pool was promised
        try:
            self._model.write_rows(sequence.slot, self._store.read(stored))
        except CapacityError as error:
            logger.warning("the text of a paused request is read once more: %s", error)
            sequence.num_rows = 0
        self.drop(sequence)
        self._pool.note(sequence.slot, sequence.request.pool_key(sequence.token_ids[: sequence.num_rows]))
        return True

    def drop(self, sequence: Sequence) -> bool:
        """Delete the rows of a request. Returns: whether it was paused."""
        entry = self._stored.pop(sequence.request.request_id, None)
        if entry is not None:
            self._store.drop(entry[1])
        return entry is not None
