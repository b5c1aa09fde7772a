"""`RecordingRunner`: models with layers that sum up a text, in our own pass, by records of their rows."""

from __future__ import annotations

from collections.abc import Sequence

from card.models.own.decoder_model import DecoderModel
from card.models.protocol import Extension
from card.models.rows.records import RecordLayout, Records
from card.models.rows.row_tree import IntArray
from card.models.runner import ExactRunner

_NO_TOKEN = -1  # of a row whose embedding was changed


def exact_runner(model: DecoderModel, *, max_model_len: int, max_tree_rows: int = 512) -> ExactRunner:
    """Return the runner of a model in our own pass; arguments and errors as of `ExactRunner`."""
    sums_up = any(layer.shape.mixer != "attention" for layer in model.layers)
    kind = RecordingRunner if sums_up else ExactRunner
    return kind(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)


class RecordingRunner(ExactRunner):
    """Runs models with short convolutions. Sequences are trees as any others, and each is cut behind any row.

    What lies behind a landmark and has no record any more is run once more, to the same bits.
    """

    def _record_layout(self, max_tree_rows: int) -> RecordLayout:
        width, num_needed = self._decoder.record
        return RecordLayout(width, num_needed, max_tree_rows + num_needed)

    @property
    def state_bytes(self) -> int:
        """Memory that a sequence takes besides its rows."""
        return self._cache.state_bytes

    def lendable_rows(self, slot: int, num_rows: int) -> int:
        """Return how many of the first ``num_rows`` rows can be copied without being run once more."""
        return self._records(slot).reach(num_rows)

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first rows of ``source`` those of the empty sequence ``slot``. Raises: see `KVCache.copy_rows`."""
        records = self._records(source)
        reached = records.reach(num_rows)
        token_ids = records.token_ids[:num_rows].tolist()
        self._cache.copy_rows(source, slot, reached)
        self._run_again(slot, token_ids)

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep the first rows and then ``rows``, in this order; drop the rest. Raises: see `KVCache.keep`."""
        records, num_kept = self._records(slot), num_prefix_rows + len(rows)
        is_cut = list(rows) == list(range(num_prefix_rows, num_kept)) and 0 <= num_kept <= self.num_rows(slot)
        if not is_cut or records.holds(num_kept):
            super().keep(slot, num_prefix_rows, rows)
            return
        token_ids = records.token_ids[:num_kept].tolist()
        super().keep(slot, records.reach(num_kept))
        self._run_again(slot, token_ids)

    def _run_again(self, slot: int, token_ids: Sequence[int]) -> None:
        """Run what a sequence lacks of a text."""
        num_held = self.num_rows(slot)
        if num_held < len(token_ids):
            new_ids = token_ids[num_held:]
            self.forward([Extension(slot, new_ids, range(num_held - 1, len(token_ids) - 1), len(new_ids))])

    def _append(self, extensions: Sequence[Extension]) -> IntArray:
        token_ids = super()._append(extensions)
        for extension in extensions:
            num_new = len(extension.token_ids)
            num_added = 0 if extension.added is None else len(extension.added)
            noted = [*[_NO_TOKEN] * num_added, *extension.token_ids[num_added:]]
            self._records(extension.slot).note(self.num_rows(extension.slot) - num_new, noted)
        return token_ids

    def _records(self, slot: int) -> Records:
        records = self._cache[slot].records
        assert records is not None
        return records
