"""`TorchRunner`: Hugging Face causal LMs behind the `LanguageModel` protocol."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from card.errors import CapacityError, CardError, ModelError, in_few_words
from card.models.features import Features
from card.models.images import PlacedImages, ShownImages, Tower
from card.models.inflation import original_size
from card.models.layer_kinds import has_state
from card.models.long_rope import switch_len
from card.models.names import OTHER_FAMILY, model_name
from card.models.own.block_layers import BlockEmbedding, embedded
from card.models.own.decoder import Decoder
from card.models.own.decoder_model import is_int8
from card.models.own.exact_decoder import ExactDecoder
from card.models.own.reasons import why_not_exact, why_not_walked
from card.models.parallel_draft import parallel_draft_of
from card.models.protocol import Extension
from card.models.rows.extension_rows import (
    added_rows,
    logits_rows_of,
    require_selectable,
    require_well_formed,
    token_ids_of,
)
from card.models.rows.kv_cache import KVCache
from card.models.rows.row_tree import BoolArray, IntArray, window_size
from card.models.rows.selection import AttentionScores, ChosenRows
from card.theirs.transformers.generic import GenericDecoder, require_causal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from card.models.own.decoder_model import LoadedModel


def _told_in_one_line(init: Callable[..., None]) -> Callable[..., None]:
    """Turn any error of taking over a model into a ModelError: its config may hold anything."""

    @functools.wraps(init)
    def explained(self: TorchRunner, model: LoadedModel, **settings: Any) -> None:
        try:
            init(self, model, **settings)
        except CardError:
            raise
        except Exception as error:
            kind = model.config.model_type
            raise ModelError(
                f"this {kind} model cannot be run: {in_few_words(error)}; compare its config.json with the "
                "published one, and the memory with its size"
            ) from error

    return explained


class TorchRunner:
    """Runs a transformers causal LM on trees of tokens, several sequences of any length in one pass.

    All new tokens of a pass share the linear layers as rows of one matrix; attention runs per sequence on its own KV
    cache. Logits and caches are inference tensors: read them, or write to them only under ``torch.inference_mode``.
    """

    has_recorded_passes: ClassVar[bool] = False
    """Passes have few, fixed shapes and are recorded, so that a writer can chain its steps on the device."""

    @_told_in_one_line
    def __init__(
        self, model: LoadedModel, *, max_model_len: int, max_tree_rows: int = 512, own_pass: bool | None = None
    ) -> None:
        """Take over ``model``, on the device and in the dtype that it has.

        Args:
            max_model_len: most positions of one sequence.
            max_tree_rows: rows that a sequence may hold beyond max_model_len, for candidates.
            own_pass: walk the decoder directly (see `architectures`) instead of through its modules; None does
                so where it is possible.
        Raises: ModelError if the model cannot be run row-wise, or not the way asked for.
        """
        self._require_runnable(model)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_model_len < 1 or max_tree_rows < 0 or (longest is not None and max_model_len > longest):
            raise ModelError(
                f"max_model_len must be 1 to {longest or 'any number'} and max_tree_rows 0 or more for"
                f" {model_name(model)}, got {max_model_len} and {max_tree_rows}"
            )
        model.train(False)
        reason = "not asked for" if own_pass is False else self._why_no_own_pass(model, max_model_len)
        if own_pass and reason is not None:
            raise ModelError(f"{model_name(model)} has no own pass: {reason}; leave own_pass at None")
        if is_int8(model) and reason is not None:
            raise ModelError(f"{model_name(model)} cannot run in int8: {reason}; use dtype bfloat16 or float32")
        with torch.inference_mode():
            self._decoder: Decoder = (
                self._own_decoder(model, max_model_len)
                if reason is None
                else self._generic_decoder(cast("PreTrainedModel", model), max_model_len)
            )
        self._no_own_pass = reason
        self.max_model_len = max_model_len  # most positions of one sequence
        self.switch_len = switch_len(model, max_model_len)  # longest text that has the rows of a short one
        self.vocab_size = self._decoder.vocab_size  # number of token ids; V of the logits
        self.device, self.dtype = self._decoder.layout.device, self._decoder.layout.dtype  # of logits and computation
        self.parallel_draft = parallel_draft_of(model)  # None: it makes one token a pass
        self.original = original_size(model)  # of the model, or of the one that it was inflated from
        self._embeddings = cast("torch.nn.Embedding | BlockEmbedding", model.get_input_embeddings())
        self.features = Features(self.original.num_layers, self.original.hidden_size)
        self.attention_scores = AttentionScores()
        self._long_slots: set[int] = set()  # see `make_long`
        self._shown: ShownImages | None = None  # None: it sees no images
        self._cache = KVCache(self._decoder.layout, max_model_len + max_tree_rows)
        self.max_rows, self.row_bytes = self._cache.max_rows, self._cache.row_bytes  # most of a sequence; of one row

    def _require_runnable(self, model: LoadedModel) -> None:
        """Raise ModelError, naming the reason, if this runner cannot run such a model."""
        require_causal(model)
        if has_state(model):
            raise ModelError(f"{model_name(model)} keeps a recurrent state; make its runner with card.models.runners")

    def _why_no_own_pass(self, model: LoadedModel, max_model_len: int) -> str | None:
        """Return why the model runs through transformers' modules, or None if it does not."""
        of_device = why_not_exact(model) if model.device.type == "cpu" or is_int8(model) else None
        return why_not_walked(model, max_model_len) or of_device

    def _own_decoder(self, model: LoadedModel, max_model_len: int) -> Decoder:
        if model.device.type == "cpu":
            return ExactDecoder(model, max_model_len)
        from card.theirs.cuda.fused import FusedDecoder

        return FusedDecoder(model, max_model_len)

    def _generic_decoder(self, model: PreTrainedModel, max_model_len: int) -> GenericDecoder:
        return GenericDecoder(model, max_model_len)

    def see_with(self, tower: Tower) -> None:
        """Take images from now on. Raises: ModelError if this model cannot be run with images."""
        reason = self._reason_blind(tower)
        if reason is not None:
            raise ModelError(f"this model cannot take images: {reason}; set max_images to 0 for text alone")
        self._shown = ShownImages(tower)

    def _reason_blind(self, tower: Tower) -> str | None:
        if type(self) is not TorchRunner:
            return "images are read on a CPU, by models without a recurrent state"
        if self.switch_len is not None:
            return "its rotary embedding (longrope) changes with the length of the text"
        if self.original.hidden_size != self._embeddings.embedding_dim:
            return "it is inflated"
        if tower.sections and not self.is_exact:
            return f"images with positions in height and width need the own pass, and {self._no_own_pass}"
        return None

    def show(self, slot: int, images: PlacedImages | None) -> None:
        """Let the rows of a sequence be those of a text with these images; None: of one without."""
        if self._shown is not None:
            self._shown.show(slot, images)

    def warm_up(self, most_tokens: int) -> None:
        """Run passes of 1 to ``most_tokens`` tokens: kernels are made at the first call of each size.

        Machine code is there already, so that integer passes run once, for the pages of the weights.
        """
        slot, most = self.open(), 1 if self.is_exact else min(most_tokens, self.max_model_len)
        for num_tokens in range(1, most + 1):
            self.forward([Extension(slot, [0] * num_tokens, range(-1, num_tokens - 1))])
            self.keep(slot, 0)
        self.close(slot)

    def release(self) -> None:
        """Give the model back to other uses; a runner without an own pass cannot run it afterwards."""
        if isinstance(self._decoder, GenericDecoder):
            self._decoder.release()

    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits [T, V] of a text by transformers' own forward. Raises: ModelError if that does not run."""
        assert isinstance(self._decoder, GenericDecoder), "of a model that runs through transformers' modules"
        try:
            with torch.inference_mode():
                return self._decoder.own_logits(token_ids)
        except Exception as error:  # the code of an architecture may raise anything
            raise ModelError(f"a trial pass of the model failed: {in_few_words(error)}; {OTHER_FAMILY}") from error

    def narrowed(self, size: int) -> contextlib.AbstractContextManager[None]:
        """Let windows and chunks of the model hold ``size`` tokens meanwhile."""
        assert isinstance(self._decoder, GenericDecoder), "of a model that runs through transformers' modules"
        return self._decoder.narrowed(size)

    @property
    def has_own_pass(self) -> bool:
        """True if the decoder is walked directly."""
        return not isinstance(self._decoder, GenericDecoder)

    @property
    def precision(self) -> str:
        """The precision of the weights as they are multiplied: int8, or a dtype."""
        decoder = self._decoder
        return decoder.precision if isinstance(decoder, ExactDecoder) else str(self.dtype).removeprefix("torch.")

    @property
    def has_blocks(self) -> bool:
        """True if weights are multiplied as the blocks of a GGUF file."""
        return isinstance(self._decoder, ExactDecoder) and self._decoder.has_blocks

    @property
    def is_exact(self) -> bool:
        """True if the bits of a row's logits depend on its text alone."""
        return isinstance(self._decoder, ExactDecoder)

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence with room for ``max_rows`` rows (None: `max_rows` of the model); return its slot.

        Raises: CapacityError if ``max_rows`` is out of range or there is no memory for it.
        """
        with torch.inference_mode():
            return self._cache.open(max_rows)

    def make_long(self, slot: int) -> None:
        """Let the rows of an empty sequence be those of a text of more than `switch_len` tokens from now on."""
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
        with torch.inference_mode():
            self._cache.copy_rows(source, slot, num_rows)

    def read_rows(self, slot: int) -> Tensor:
        """Return a copy of a sequence's rows. Raises: see `KVCache.read_rows`."""
        with torch.inference_mode():
            return self._cache.read_rows(slot)

    def write_rows(self, slot: int, rows: Tensor) -> None:
        """Fill an empty sequence with rows that `read_rows` gave. Raises: see `KVCache.write_rows`."""
        with torch.inference_mode():
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
        read = sum(chosen if size is None else min(size, num_rows) for size in windows)
        return read * self.row_bytes // len(windows)

    def embedding(self, token_id: int) -> Tensor:
        """Return the row of a token in the input embeddings, [D]; that of the original of an inflated model."""
        return self.embeddings([token_id])[0]

    def embeddings(self, token_ids: Sequence[int]) -> Tensor:
        """Return the rows of tokens in the input embeddings, [n, D]; as `embedding`."""
        with torch.inference_mode():
            rows = embedded(self._embeddings, torch.tensor(token_ids, dtype=torch.int64, device=self.device))
        return rows[:, : self.original.hidden_size]

    def forward(self, extensions: Sequence[Extension]) -> list[Tensor]:
        """Run the new tokens of several sequences in one pass and append their rows.

        Returns: per extension [T - first_logits_idx, V] in the model's dtype, on its device.
        Raises: CapacityError if rows or positions do not suffice; ModelError for a token id outside the vocabulary, a
            parent that is no earlier row, a slot named twice. Nothing has changed then.
        """
        if not extensions:
            return []
        held = [self._cache[extension.slot].tree.num_rows for extension in extensions]
        try:
            with torch.inference_mode():
                return self._forward(extensions)
        except BaseException:
            self.features.leave(None)
            self.attention_scores.leave({})
            for extension, num_rows in zip(extensions, held, strict=True):
                self._cache[extension.slot].tree.truncate(num_rows)
            raise

    def _forward(self, extensions: Sequence[Extension]) -> list[Tensor]:
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
        if isinstance(self._decoder, GenericDecoder):
            self._decoder.long_rows = self._long_rows(extensions, positions)
        logits_rows = logits_rows_of(extensions, self.device)
        states = self.features.begin(logits_rows)
        images, turned = None, np.concatenate(positions)
        if self._shown is not None:
            slots = [extension.slot for extension in extensions]
            turned = self._shown.positions(slots, positions)
            images = self._shown.rows(slots, positions, self._on_device)
        elif any(extension.added is not None for extension in extensions):
            images = added_rows(extensions, self.embeddings, self.device)
        logits = self._decoder.forward(
            self._on_device(token_ids), self._on_device(turned), steps, logits_rows, states, images
        )
        self.features.leave(states, extensions)
        scored = zip(extensions, steps, strict=True)
        self.attention_scores.leave({one.slot: step.scores.cpu() for one, step in scored if step.scores is not None})
        if len(extensions) == 1:
            return [logits]
        return list(torch.split(logits, [len(e.token_ids) - e.first_logits_idx for e in extensions]))

    def _on_device(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)

    def _long_rows(self, extensions: Sequence[Extension], positions: Sequence[IntArray]) -> BoolArray | None:
        """Return which rows of a pass are those of long texts, [sum T]; None if no text is ever long.

        A row beyond the short context is one of a long text, whatever its sequence was opened for.
        """
        length = self.switch_len
        if length is None:
            return None
        rows = [
            (of >= length) | (extension.slot in self._long_slots)
            for extension, of in zip(extensions, positions, strict=True)
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
            if (last := tree.furthest(start)) >= self.max_model_len:
                raise CapacityError(
                    f"slot {extension.slot}: a token at position {last} does not fit into max_model_len"
                    f" ({self.max_model_len}); end the sequence, or set a larger max_model_len"
                )
        return token_ids_of(extensions, self._embeddings.num_embeddings)
