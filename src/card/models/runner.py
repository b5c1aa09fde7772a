"""Runners: models behind the `LanguageModel` protocol, each sequence a tree of rows over its own KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from card.errors import CapacityError, ModelError, named
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.models.features import Features
from card.models.images import PlacedImages, ShownImages, Tower
from card.models.inflation import original_size
from card.models.loaded_model import LoadedModel
from card.models.long_texts import CHANGES_WITH_LENGTH, switch_len
from card.models.names import model_name
from card.models.own.decoder import Decoder
from card.models.own.decoder_model import DecoderModel
from card.models.own.draft_block import Lent
from card.models.own.exact_decoder import ExactDecoder
from card.models.own.expert_tables import ExpertFacts
from card.models.own.layers import BlockWeight, embedded
from card.models.own.row_inputs import RowInputs
from card.models.parallel_draft import parallel_draft_of
from card.models.protocol import Extension
from card.models.rows.extension_rows import (
    given_rows,
    logits_rows_of,
    require_selectable,
    require_well_formed,
    token_ids_of,
)
from card.models.rows.kv_cache import KVCache
from card.models.rows.kv_layout import KVLayout
from card.models.rows.parts import RowsPart
from card.models.rows.records import RecordLayout
from card.models.rows.row_tree import BoolArray, IntArray, window_size
from card.models.rows.selection import AttentionScores, ChosenRows


class RowRunner(ABC):
    """Runs a decoder on trees of tokens, several sequences of any length in one pass.

    All new tokens of a pass share the linear layers as rows of one matrix; attention runs per sequence on its own KV
    cache.
    """

    has_recorded_passes: ClassVar[bool] = False
    """Passes have few, fixed shapes and are recorded, so that a writer can chain its steps on the device."""
    is_exact: ClassVar[bool] = False
    """The bits of a row's logits depend on its text alone."""
    has_own_pass: bool  # the weights are walked directly
    has_blocks: bool = False  # they are multiplied as the blocks of a GGUF file
    precision: str  # of the weights as they are multiplied: int8, or the name of a dtype
    device: Any  # of the computation
    dtype: Any
    experts: ExpertFacts | None = None  # None: it has none, or their passes do not count them
    block_inputs: RowInputs | None = None  # what makes inputs of tokens and states; None: it reads tokens alone

    def __init__(self, model: LoadedModel, *, max_model_len: int, max_tree_rows: int) -> None:
        """Take over a model.

        Args:
            max_model_len: most positions of one sequence.
            max_tree_rows: rows that a sequence may hold beyond max_model_len, for candidates.
        Raises: ModelError if its context is shorter.
        """
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_model_len < 1 or max_tree_rows < 0 or (longest is not None and max_model_len > longest):
            raise ModelError(
                f"{named('max_model_len')} must be 1 to {longest or 'any number'} and max_tree_rows 0 or more for"
                f" {model_name(model)}, got {max_model_len} and {max_tree_rows}"
            )
        self.max_model_len = max_model_len  # most positions of one sequence
        # The longest text that has the rows of a short one; None: no text has others.
        self.switch_len = switch_len(model, max_model_len)
        self._long_slots: set[int] = set()  # see `make_long`
        self._decoder = self._make_decoder(model, max_model_len)
        self._has_run = False
        self.vocab_size = self._decoder.vocab_size  # number of token ids; V of the logits
        self.parallel_draft = parallel_draft_of(model)  # None: it makes one token a pass
        self.original = original_size(model)  # of the model, or of the one that it was inflated from
        self.features = Features(self.original.num_layers, self.original.hidden_size, has_raw=self.is_exact)
        self.attention_scores = AttentionScores()
        self._shown: ShownImages | None = None  # None: it sees no images
        records = self._record_layout(max_tree_rows)
        self._cache = KVCache(self._decoder.layout, max_model_len + max_tree_rows, records=records)
        self.max_rows, self.row_bytes = self._cache.max_rows, self._cache.row_bytes  # most of a sequence; of one row

    @property
    def experts_read(self) -> int:
        """Different experts that the rows of the last pass have chosen, all layers together; 0 if none are counted."""
        return 0

    @abstractmethod
    def _make_decoder(self, model: Any, max_model_len: int) -> Decoder:
        """Return what computes the passes."""

    def _record_layout(self, max_tree_rows: int) -> RecordLayout | None:
        """Return what the cache holds besides rows; None for nothing."""
        return None

    @property
    @abstractmethod
    def num_embeddings(self) -> int:
        """Number of token ids that have an embedding."""

    @abstractmethod
    def _embedded(self, token_ids: Sequence[int]) -> Floats:
        """Return the rows of tokens in the input embeddings, [n, D]."""

    def embeddings(self, token_ids: Sequence[int]) -> Floats:
        """Return the rows of tokens in the input embeddings, [n, D]; those of the original of an inflated model."""
        return self._embedded(token_ids)[:, : self.original.hidden_size]

    def see_with(self, tower: Tower) -> None:
        """Take images from now on. Raises: ModelError if this model cannot be run with images."""
        reason = self._reason_blind(tower)
        if reason is not None:
            raise ModelError(f"this model cannot take images: {reason}; set {named('max_images')} to 0 for text alone")
        self._shown = ShownImages(tower)

    def _reason_blind(self, tower: Tower) -> str | None:
        """Return why images cannot be taken; None if they can."""
        if self.switch_len is not None:
            return CHANGES_WITH_LENGTH
        return "it is inflated" if self._is_inflated else None

    @property
    def _is_inflated(self) -> bool:
        return bool(self.original.hidden_size != self._embedded([0]).shape[1])

    def show(self, slot: int, images: PlacedImages | None) -> None:
        """Let the rows of a sequence be those of a text with these images; None: of one without."""
        if self._shown is not None:
            self._shown.show(slot, images)

    @property
    def row_layout(self) -> KVLayout:
        """Layout of the rows of all layers."""
        return self._cache.layout

    def warm_up(self, most_tokens: int) -> None:
        """Run passes of 1 to ``most_tokens`` tokens: kernels are made at the first call of each size.

        Machine code is there already, so that exact passes run once, for the pages of the weights, unless one has run.
        Of the rows of this pass and earlier ones no memory is kept: texts need more.
        """
        if not (self.is_exact and self._has_run):
            most = 1 if self.is_exact else min(most_tokens, self.max_model_len)
            slot = self.open(1 if self.is_exact else None)
            for num_tokens in range(1, most + 1):
                self.forward([Extension(slot, [0] * num_tokens, range(-1, num_tokens - 1))])
                self.keep(slot, 0)
            self.close(slot)
        self._cache.drop_free()

    def release(self) -> None:  # noqa: B027 - most have taken nothing from it
        """Give the model back to other uses; a runner without an own pass cannot run it afterwards."""

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence with room for ``max_rows`` rows (None: `max_rows` of the model); return its slot.

        Raises: CapacityError if ``max_rows`` is out of range or there is no memory for it.
        """
        return self._cache.open(max_rows)

    def make_long(self, slot: int) -> None:
        """Let the rows of an empty sequence be those of a text of more than `switch_len` tokens from now on."""
        assert self.switch_len is not None, "of a model without a switch_len"
        assert self.num_rows(slot) == 0, "rows of a short text do not become those of a long one"
        self._long_slots.add(slot)

    def close(self, slot: int) -> None:
        """Drop a sequence; its memory may serve later ones. Raises: ModelError if the slot is not open."""
        self._cache.close(slot)
        self._long_slots.discard(slot)
        self.show(slot, None)

    def capacity(self, slot: int) -> int:
        """Return how many rows the sequence has room for. Raises: ModelError if the slot is not open."""
        return self._cache[slot].tree.max_rows

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first rows of ``source`` those of the empty sequence ``slot``. Raises: see `KVCache.copy_rows`."""
        assert (source in self._long_slots) == (slot in self._long_slots), "rows of a short and of a long text differ"
        self._cache.copy_rows(source, slot, num_rows)

    def held_bytes(self, slots: Sequence[int]) -> int:
        """Return the memory of sequences; see `KVCache.held_bytes`."""
        return self._cache.held_bytes(slots)

    def shared_bytes(self, num_rows: int) -> int:
        """Return the memory that a copy of so many rows shares with its source."""
        return self._cache.shared_bytes(num_rows)

    def read_rows(self, slot: int) -> Any:
        """Return a copy of a sequence's rows. Raises: see `KVCache.read_rows`."""
        return self._cache.read_rows(slot)

    def write_rows(self, slot: int, rows: Any) -> None:
        """Fill an empty sequence with rows that `read_rows` gave. Raises: see `KVCache.write_rows`."""
        self._cache.write_rows(slot, rows)

    def num_rows(self, slot: int) -> int:
        """Return how many rows the sequence holds. Raises: ModelError if the slot is not open."""
        return self._cache[slot].tree.num_rows

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep the first rows and then ``rows``, in this order; drop the rest. Raises: see `KVCache.keep`."""
        self._cache.keep(slot, num_prefix_rows, rows)

    def bytes_read(self, num_rows: int, reads: ChosenRows | None) -> int:
        """Return the bytes of KV that a pass reads of a sequence with ``num_rows`` rows, the new ones included."""
        windows = [window_size(window) for window in self._decoder.windows]
        chosen = num_rows if reads is None else reads.num_read(num_rows)
        seen = [chosen if size is None else min(size, num_rows) for size in windows]
        layout = self._decoder.layout
        read = sum(count * layer.num_elements for count, layer in zip(seen, layout.layers, strict=True))
        return int(read * layout.dtype.itemsize)

    def forward(self, extensions: Sequence[Extension]) -> list[Any]:
        """Run the new tokens of several sequences in one pass and append their rows.

        Returns: per extension the logits [T - first_logits_idx, V], see `LanguageModel.forward`.
        Raises: CapacityError if rows or positions do not suffice; ModelError for a token id outside the vocabulary, a
            parent that is no earlier row, a slot named twice. Nothing has changed then.
        """
        if not extensions:
            return []
        held = [self._cache[extension.slot].tree.num_rows for extension in extensions]
        self._has_run = True
        try:
            return self._forward(extensions)
        except BaseException:
            self.features.leave(None)
            self.attention_scores.leave({})
            for extension, num_rows in zip(extensions, held, strict=True):
                self._cache[extension.slot].tree.truncate(num_rows)
            raise

    def _forward(self, extensions: Sequence[Extension]) -> list[Any]:
        token_ids = self._append(extensions)
        steps: list[Any] = []
        positions: list[IntArray] = []
        offset = 0
        for extension in extensions:
            sequence = self._cache[extension.slot]
            num_new = len(extension.token_ids)
            positions.append(sequence.tree.positions(sequence.tree.num_rows - num_new))
            steps.append(self._decoder.step(sequence, extension, offset))
            offset += num_new
        if self.switch_len is not None:
            self._decoder.long_rows = self._long_rows(self.switch_len, extensions, positions)
        logits_rows = logits_rows_of(extensions)
        states = self.features.begin(logits_rows)
        images, turned = None, np.concatenate(positions)
        if self._shown is not None:
            slots = [extension.slot for extension in extensions]
            turned = self._shown.positions(slots, positions)
            images = self._shown.rows(slots, positions)
        elif any(extension.inputs is not None for extension in extensions):
            images = given_rows(extensions)
        logits = self._decoder.forward(token_ids, turned, steps, logits_rows, states, images)
        self.features.leave(states, extensions)
        scored = zip(extensions, steps, strict=True)
        self.attention_scores.leave({one.slot: step.scores for one, step in scored if step.scores is not None})
        ends = np.cumsum([len(one.token_ids) - one.first_logits_idx for one in extensions]).tolist()
        return [logits[first:end] for first, end in zip([0, *ends], ends, strict=False)]

    def _long_rows(self, length: int, extensions: Sequence[Extension], positions: Sequence[IntArray]) -> BoolArray:
        """Return which rows of a pass, which stand at these positions, are those of long texts, [sum T].

        A row beyond the short context is one of a long text, whatever its sequence was opened for.
        """
        rows = [
            (places >= length) | (extension.slot in self._long_slots)
            for extension, places in zip(extensions, positions, strict=True)
        ]
        return np.concatenate(rows)

    def _append(self, extensions: Sequence[Extension]) -> IntArray:
        """Add the new rows to the sequences' trees and return all token ids, [sum T]."""
        require_well_formed(extensions)
        for extension in extensions:
            tree = self._cache[extension.slot].tree
            start = tree.num_rows
            require_selectable(extension, tree, self._decoder.layout)
            tree.append(extension.parents)
            self._cache.make_room(extension.slot, start)
            if (last := tree.furthest(start)) >= self.max_model_len:
                raise CapacityError(
                    f"slot {extension.slot}: a token at position {last} does not fit into "
                    f"{named('max_model_len')} ({self.max_model_len}); end the sequence, or set a larger one"
                )
        return token_ids_of(extensions, self.num_embeddings)


class ExactRunner(RowRunner):
    """Runs a decoder by machine code on a CPU: the bits of a row's logits depend on its text alone."""

    is_exact = has_own_pass = True
    device = "cpu"
    _decoder: ExactDecoder

    def __init__(self, model: DecoderModel, *, max_model_len: int, max_tree_rows: int = 512) -> None:
        """Take over a model; arguments as of `RowRunner`. Raises: ModelError if this computer has no exact passes."""
        if (reason := why_not_int8()) is not None:
            raise ModelError(f"{model_name(model)} cannot run in our own pass: {reason}")
        self._table = model.embeddings
        self.block_inputs = model.inputs
        head = model.lm_head.weight
        self._head_blocks = head if isinstance(head, BlockWeight) else None
        super().__init__(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)
        self.precision, self.has_blocks = self._decoder.precision, self._decoder.has_blocks
        self.dtype = self._decoder.layout.dtype
        self.experts = self._decoder.experts

    def part_bytes(self, part: RowsPart) -> int:
        """Return the size of some rows in files."""
        return self._cache.part_bytes(part)

    def usable_rows(self, num_rows: int, text_len: int) -> int:
        """Return how many of the first rows of a text in a file can be used: any."""
        return num_rows

    def separable_rows(self, slot: int, num_rows: int) -> int:
        """Return behind how many of the first rows of a sequence a text can be cut for a file: any."""
        return num_rows

    def read_part(self, slot: int, part: RowsPart) -> Any:
        """Return a copy of some rows of a chain. Raises: see `KVCache.read_part`."""
        return self._cache.read_part(slot, part)

    def append_part(self, slot: int, part: RowsPart, taken: bytes | memoryview, num_rows: int) -> None:
        """Put such rows, as bytes, behind those of a sequence. Raises: see `KVCache.append_part`."""
        self._cache.append_part(slot, part, np.frombuffer(taken, np.uint8), num_rows)

    @property
    def experts_read(self) -> int:
        """Different experts that the rows of the last pass have chosen, all layers together; 0 without experts."""
        return self._decoder.experts_read

    def _make_decoder(self, model: DecoderModel, max_model_len: int) -> ExactDecoder:
        return ExactDecoder(model, max_model_len)

    @property
    def lent(self) -> Lent:
        """The ends of the model, for a block that drafts for it."""
        return Lent(self._table, self._decoder.head, self._head_blocks)

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that have an embedding."""
        return int(self._table.shape[0])

    def _embedded(self, token_ids: Sequence[int]) -> Floats:
        return embedded(self._table, token_ids)
