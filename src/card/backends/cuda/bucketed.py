"""`BucketedRunner`: a `TorchRunner` whose small passes have few, fixed shapes, so that CUDA replays them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from card.backends.cuda.fused import FusedDecoder, TensorStates, why_not_fused
from card.backends.cuda.graphs import StagedTensor, bucket_of
from card.backends.cuda.static_cache import MAX_STATIC_TOKENS, TOKEN_BUCKETS, StaticDecoder
from card.backends.transformers.arrays import as_array, as_logits
from card.backends.transformers.runner import TorchRunner
from card.errors import ModelError
from card.models.long_texts import CHANGES_WITH_LENGTH
from card.models.names import model_name
from card.models.protocol import Extension
from card.models.rows.row_tree import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BucketedRunner(TorchRunner):
    """Runs a pass over one sequence of at most MAX_STATIC_TOKENS tokens in the next larger of a few shapes.

    Padding rows see only themselves; their logits are dropped and their places are overwritten. A shape is recorded
    when it is first needed, on CUDA as a graph. All other passes run as in a `TorchRunner`: several sequences at once,
    longer passes, models that are not walked directly or have sliding windows.
    """

    has_recorded_passes = True

    def __init__(
        self, model: PreTrainedModel, *, max_model_len: int, max_tree_rows: int = 512, own_pass: bool | None = None
    ) -> None:
        """Make a runner of ``model``; arguments and errors as of `TorchRunner`.

        Args:
            own_pass: walk the weights directly instead of through the modules; None: where possible.
        """
        self._walks = own_pass
        super().__init__(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)
        self.static: StaticDecoder | None = None
        if isinstance(self._decoder, FusedDecoder) and not any(self._decoder.windows):
            with torch.inference_mode():
                self.static = StaticDecoder(self._decoder, self.max_rows)
                logits_shape = (MAX_STATIC_TOKENS, self.vocab_size)
                self._logits = torch.zeros(logits_shape, dtype=self.dtype, device=self.device)
        self._kept: dict[int, Tensor] = {}  # by layer, [MAX_STATIC_TOKENS, D]: recorded passes write states there
        self._passes: dict[tuple[int, int], _BucketPass] = {}  # by tokens and span

    def _make_decoder(self, model: PreTrainedModel, max_model_len: int) -> Any:
        reason = "not asked for" if self._walks is False else why_not_fused(model)
        if reason is None and self.switch_len is not None:
            reason = CHANGES_WITH_LENGTH
        if self._walks and reason is not None:
            raise ModelError(f"{model_name(model)} has no own pass: {reason}; leave own_pass at None")
        return FusedDecoder(model, max_model_len) if reason is None else super()._make_decoder(model, max_model_len)

    def close(self, slot: int) -> None:
        """Drop a sequence; its memory may serve later ones. Raises: ModelError if the slot is not open."""
        super().close(slot)
        if self.static:
            self.static.forget(slot)

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep the first rows and then ``rows``, in this order; drop the rest. Raises: see `KVCache.keep`."""
        super().keep(slot, num_prefix_rows, rows)
        if self.static:
            num_still = next((i for i, row in enumerate(rows) if row != num_prefix_rows + i), len(rows))
            self.static.forget(slot, num_prefix_rows + num_still)

    def lend(self, slot: int, parents: Sequence[int]) -> BoolArray:
        """Bring the sequence to the desk and return which rows new rows with these parents would see; no row is added.

        Returns: [T, S] for S rows, the new ones included.
        Raises: CapacityError, ModelError as `forward`.
        """
        assert self.static is not None, "no static passes for this model"
        sequence = self._cache[slot]
        tree, num_held = sequence.tree, sequence.tree.num_rows
        tree.append(np.asarray(parents, np.int64))
        visible = _visible(tree.bias(num_held), len(parents), tree.num_rows)
        tree.truncate(num_held)
        with torch.inference_mode():
            self.static.bring(slot, sequence.kv, num_held)
        return visible

    def adopt(self, slot: int, parents: Sequence[int]) -> None:
        """Add rows with these parents, which a step wrote to the desk after the sequence's own rows."""
        assert self.static is not None, "no static passes for this model"
        sequence = self._cache[slot]
        sequence.tree.append(np.asarray(parents, np.int64))
        with torch.inference_mode():
            self.static.give_back(slot, sequence.kv, len(parents))

    def _follow_wishes(self, static: StaticDecoder) -> None:
        """Drop passes that were recorded for other features; make room for the states of the present ones."""
        static.recorder.wait()
        self._passes.clear()
        shape = (MAX_STATIC_TOKENS, int(self._table.weight.shape[1]))
        self._kept = {one: torch.zeros(shape, dtype=self.dtype, device=self.device) for one in self.features.layers}

    def _forward(self, extensions: Sequence[Extension]) -> list[Any]:
        if self.static is None or len(extensions) > 1 or len(extensions[0].token_ids) > MAX_STATIC_TOKENS:
            return super()._forward(extensions)
        if any(one is not None for one in (extensions[0].reads, extensions[0].scores, extensions[0].inputs)):
            return super()._forward(extensions)
        self.attention_scores.leave({})
        token_ids = self._append(extensions)
        slot, num_new = extensions[0].slot, len(token_ids)
        sequence = self._cache[slot]
        tree, start = sequence.tree, sequence.tree.num_rows - num_new
        if self._kept.keys() != self.features.layers:
            self._follow_wishes(self.static)
        bucket_pass = self._pass_for(self.static, num_new, start)
        self.static.bring(slot, sequence.kv, start)
        bucket_pass.run(token_ids, tree.positions(start), start, tree.bias(start))
        self.static.give_back(slot, sequence.kv, num_new)
        first = extensions[0].first_logits_idx
        if states := self.features.begin(slice(first, None)):
            for layer, rows in self._kept.items():
                states.take(layer, as_array(rows[:num_new].clone()))
        self.features.leave(states, extensions)
        return [as_logits(self._logits[first:num_new].clone())]  # the next pass writes there

    def _pass_for(self, static: StaticDecoder, num_new: int, start: int) -> _BucketPass:
        num_tokens = bucket_of(num_new, TOKEN_BUCKETS)
        assert num_tokens is not None
        shape = num_tokens, static.span_of(start + num_tokens)
        if shape not in self._passes:
            rows = {layer: states[:num_tokens] for layer, states in self._kept.items()}
            self._passes[shape] = _BucketPass(static, *shape, self._logits[:num_tokens], rows)
        return self._passes[shape]


class _BucketPass:
    """A recorded pass of one shape."""

    def __init__(
        self, static: StaticDecoder, num_tokens: int, span: int, logits: Tensor, kept: Mapping[int, Tensor]
    ) -> None:
        self._static = static
        self._logits = logits
        self._kept = kept
        self._inputs = StagedTensor((3, num_tokens), torch.int64, static.device)  # tokens, positions, places
        self._visible = StagedTensor((num_tokens, span), torch.bool, static.device)
        self._fill(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, np.zeros((0, 0), np.bool_))
        self._replay = static.record(self._compute)

    def run(self, token_ids: IntArray, positions: IntArray, start: int, bias: FloatArray | None) -> None:
        """Run the tokens of rows ``start`` .. on the desk."""
        num_new = len(token_ids)
        self._fill(token_ids, positions, start, _visible(bias, num_new, start + num_new))
        self._replay()

    def _fill(self, token_ids: IntArray, positions: IntArray, start: int, visible: BoolArray) -> None:
        num_new = len(token_ids)
        num_tokens, span = self._visible.tensor.shape
        inputs = np.zeros((3, num_tokens), np.int64)
        inputs[0, :num_new], inputs[1, :num_new] = token_ids, positions
        inputs[2] = np.arange(start, start + num_tokens)
        sees = np.zeros((num_tokens, span), np.bool_)
        sees[:num_new, : visible.shape[1]] = visible
        padding = np.arange(num_new, num_tokens)
        sees[padding, start + padding] = True
        self._inputs.fill(inputs)
        self._visible.fill(sees)

    def _compute(self) -> None:
        token_ids, positions, row_idx = self._inputs.tensor.unbind(0)
        states = TensorStates(self._kept.keys()) if self._kept else None
        self._logits.copy_(self._static.forward(token_ids, positions, row_idx, self._visible.tensor, states))
        if states:
            for layer, rows in self._kept.items():
                rows.copy_(states.kept[layer])


def _visible(bias: FloatArray | None, num_new: int, num_rows: int) -> BoolArray:
    """Return which rows the newest rows see by a bias of `RowTree`, [num_new, num_rows]."""
    return np.ones((num_new, num_rows), np.bool_) if bias is None else bias[:, :num_rows] == 0
