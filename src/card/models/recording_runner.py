"""`RecordingRunner`: models with layers that sum up a text, in our own pass, by records of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from card.kernels.packed_linear import padded
from card.models.own.decoder_model import DecoderModel
from card.models.protocol import Extension
from card.models.rows.records import BLOCK_ROWS, RecordLayout, Records
from card.models.rows.row_tree import IntArray
from card.models.runner import ExactRunner

_NO_TOKEN = -1  # of a row with another input than its embedding


def exact_runner(model: DecoderModel, *, max_model_len: int, max_tree_rows: int = 512) -> ExactRunner:
    """Return the runner of a model in our own pass; arguments and errors as of `ExactRunner`."""
    sums_up = any(layer.shape.mixer != "attention" for layer in model.layers)
    kind = RecordingRunner if sums_up else ExactRunner
    return kind(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)


class RecordingRunner(ExactRunner):
    """Runs models with short convolutions or the delta rule. Sequences are trees as any others, cut behind any row.

    What lies behind a landmark and has no record any more is run once more, to the same bits.
    """

    def forward(self, extensions: Sequence[Extension]) -> list[Any]:
        """Run a pass, see `RowRunner.forward`; states and records that a failed one has lost are made again first."""
        for extension in extensions:
            self._mend(extension.slot)
        all_records = [self._records(extension.slot) for extension in extensions]
        firsts = [records.first for records in all_records]
        try:
            return super().forward(extensions)
        except BaseException:
            for records, first in zip(all_records, firsts, strict=True):
                records.is_lost |= records.first > first
            raise

    def _mend(self, slot: int) -> None:
        if self._records(slot).is_lost:
            num_text = self._cache[slot].tree.num_prefix_rows
            self.keep(slot, num_text, range(num_text, self.num_rows(slot)))

    @property
    def keeps_state(self) -> bool:
        """True if some layers have a state, besides records."""
        return self._decoder.state_size > 0

    def read_rows(self, slot: int) -> Any:
        """Return a copy of a sequence's rows. Raises: see `KVCache.read_rows`."""
        self._mend(slot)
        return super().read_rows(slot)

    def _record_layout(self, max_tree_rows: int) -> RecordLayout:
        (width, num_needed), layout = self._decoder.record, self._decoder.layout
        made = RecordLayout(width, num_needed, max_tree_rows + num_needed, self._decoder.state_size)
        if not made.state_size:
            return made
        # Landmarks take no more memory than keys and values: each 1,728 rows with Qwen3.5's layers of 0.8 B.
        row_bytes = max(1, layout.row_elements * layout.dtype.itemsize)
        return replace(made, block_rows=padded(-(-made.mark_bytes // row_bytes), BLOCK_ROWS))

    @property
    def state_bytes(self) -> int:
        """Memory that a sequence takes besides its rows."""
        return self._cache.state_bytes

    def lendable_rows(self, slot: int, num_rows: int) -> int:
        """Return how many of the first ``num_rows`` rows can be copied without being run once more."""
        return self._records(slot).reach(num_rows)

    def usable_rows(self, num_rows: int, text_len: int) -> int:
        """Return how many of the first rows of a text in a file can be used: all, or those up to a landmark."""
        block_rows = self._record_layout(0).block_rows
        return num_rows if num_rows == text_len else num_rows // block_rows * block_rows

    def separable_rows(self, slot: int, num_rows: int) -> int:
        """Return behind how many of the first rows of a sequence a text can be cut for a file."""
        return self._records(slot).separable(num_rows)

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first rows of ``source`` those of the empty sequence ``slot``. Raises: see `KVCache.copy_rows`."""
        records = self._records(source)
        reached = records.reach(num_rows)
        token_ids = records.token_ids[:num_rows].tolist()
        self._cache.copy_rows(source, slot, reached)
        self._run_again(slot, token_ids, range(-1, num_rows - 1))

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep the first rows and then ``rows``, in this order; drop the rest. Raises: see `KVCache.keep`."""
        records, num_kept = self._records(slot), num_prefix_rows + len(rows)
        is_cut = list(rows) == list(range(num_prefix_rows, num_kept)) and 0 <= num_kept <= self.num_rows(slot)
        if records.holds(num_kept) if is_cut else not records.layout.state_size or records.holds(num_prefix_rows):
            super().keep(slot, num_prefix_rows, rows)
        else:
            if not is_cut:
                super().keep(slot, num_prefix_rows, rows)  # which numbers them anew
            self._go_back(slot, num_prefix_rows, num_kept)
        records.num_text = num_prefix_rows

    def _go_back(self, slot: int, num_prefix_rows: int, num_kept: int) -> None:
        """Keep ``num_kept`` rows, of which the first are a chain: cut at the last landmark, and run the rest again."""
        records, tree = self._records(slot), self._cache[slot].tree
        token_ids, parents = records.token_ids[:num_kept].tolist(), tree.parents[:num_kept].tolist()
        super().keep(slot, records.reach(num_prefix_rows))
        try:
            self._run_again(slot, token_ids, parents)
        except BaseException:  # its keys and values are there all the same: whatever is run gives the same bits
            tree.append(parents[tree.num_rows :])
            records.is_lost = True
            raise

    def _run_again(self, slot: int, token_ids: Sequence[int], parents: Sequence[int]) -> None:
        """Run those of some rows that a sequence lacks."""
        num_held = self.num_rows(slot)
        if new_ids := token_ids[num_held:]:
            self.forward([Extension(slot, new_ids, parents[num_held:], len(new_ids))])

    def _append(self, extensions: Sequence[Extension]) -> IntArray:
        token_ids = super()._append(extensions)
        for extension in extensions:
            num_new = len(extension.token_ids)
            num_given = 0 if extension.inputs is None else len(extension.inputs)
            noted = [*[_NO_TOKEN] * num_given, *extension.token_ids[num_given:]]
            self._records(extension.slot).note(self.num_rows(extension.slot) - num_new, noted)
        return token_ids

    def _records(self, slot: int) -> Records:
        records = self._cache[slot].records
        assert records is not None
        return records
