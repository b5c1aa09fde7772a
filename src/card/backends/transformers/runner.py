"""`TorchRunner`: models of transformers behind the `LanguageModel` protocol, on any device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from card.backends.transformers.arrays import as_array, as_logits, as_tensor
from card.backends.transformers.generic import GenericDecoder, require_causal
from card.errors import CardError, ModelError, in_few_words
from card.kernels.number_types import Floats
from card.models.images import Tower
from card.models.layer_kinds import has_state
from card.models.names import OTHER_FAMILY, model_name
from card.models.own.decoder_model import is_int8
from card.models.protocol import Extension
from card.models.runner import RowRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _told_in_one_line(init: Callable[..., None]) -> Callable[..., None]:
    """Turn any error of ``init`` into a ModelError: a model's config may hold anything."""

    @functools.wraps(init)
    def explained(self: TorchRunner, model: PreTrainedModel, **settings: Any) -> None:
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


class TorchRunner(RowRunner):
    """Runs a causal LM of transformers through its own modules, with our attention over our KV caches.

    Caches are inference tensors: write to them only under ``torch.inference_mode``.
    """

    _decoder: Any

    @_told_in_one_line
    def __init__(self, model: PreTrainedModel, *, max_model_len: int, max_tree_rows: int = 512) -> None:
        """Make a runner of ``model``, on its device and in its dtype; arguments as of `RowRunner`.

        Raises: ModelError if the model cannot be run row-wise.
        """
        self._require_runnable(model)
        model.train(False)
        if is_int8(model):
            raise ModelError(f"{model_name(model)} cannot run in int8: it has no pass of our own; use another dtype")
        self._table: Any = model.get_input_embeddings()
        with torch.inference_mode():
            super().__init__(model, max_model_len=max_model_len, max_tree_rows=max_tree_rows)
        self.device, self.dtype = self._decoder.layout.device, self._decoder.layout.dtype  # of logits and computation
        self.precision = str(self.dtype).removeprefix("torch.")
        self.has_own_pass = not isinstance(self._decoder, GenericDecoder)

    def _require_runnable(self, model: PreTrainedModel) -> None:
        """Raise ModelError, with the reason, if this runner cannot run the model."""
        require_causal(model)
        if has_state(model):
            raise ModelError(f"{model_name(model)} keeps a recurrent state; make its runner with card.models.runners")

    def _make_decoder(self, model: PreTrainedModel, max_model_len: int) -> Any:
        return GenericDecoder(model, max_model_len)

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that have an embedding."""
        return int(self._table.weight.shape[0])

    def _embedded(self, token_ids: Sequence[int]) -> Floats:
        """Return the stored rows, which some models' own modules scale."""
        with torch.inference_mode():
            table = self._table.weight
            ids = torch.tensor(token_ids, dtype=torch.int64, device=table.device)
            rows: Floats = as_array(table.index_select(0, ids))
            return rows

    def _reason_blind(self, tower: Tower) -> str | None:
        if type(self) is not TorchRunner:
            return "images are read on a CPU, by models without a recurrent state"
        if tower.sections:
            return "images with positions in height and width need the own pass, and it runs in transformers' modules"
        return super()._reason_blind(tower)

    def release(self) -> None:
        """Release the model for other uses; afterwards it cannot run here."""
        if isinstance(self._decoder, GenericDecoder):
            self._decoder.release()

    def own_logits(self, token_ids: Sequence[int]) -> Any:
        """Return the logits [T, V] of a text by transformers' own forward. Raises: ModelError if that does not run."""
        assert isinstance(self._decoder, GenericDecoder), "of a model that runs through transformers' modules"
        try:
            with torch.inference_mode():
                return as_array(self._decoder.own_logits(token_ids))
        except Exception as error:  # an architecture's code may raise any type
            raise ModelError(f"a trial pass of the model failed: {in_few_words(error)}; {OTHER_FAMILY}") from error

    def narrowed(self, size: int) -> contextlib.AbstractContextManager[None]:
        """Inside the block windows and chunks of the model hold ``size`` tokens."""
        assert isinstance(self._decoder, GenericDecoder), "of a model that runs through transformers' modules"
        return self._decoder.narrowed(size)

    def open(self, max_rows: int | None = None) -> int:
        """Start an empty sequence; as `RowRunner.open`."""
        with torch.inference_mode():
            return super().open(max_rows)

    def copy_rows(self, source: int, slot: int, num_rows: int) -> None:
        """Make the first rows of ``source`` those of the empty sequence ``slot``. Raises: see `KVCache.copy_rows`."""
        with torch.inference_mode():
            super().copy_rows(source, slot, num_rows)

    def read_rows(self, slot: int) -> Any:
        """Return a copy of a sequence's rows as an array. Raises: see `KVCache.read_rows`."""
        with torch.inference_mode():
            return as_array(super().read_rows(slot), keeps_bits=True)

    def write_rows(self, slot: int, rows: Any) -> None:
        """Fill an empty sequence with rows from `read_rows`. Raises: see `KVCache.write_rows`."""
        with torch.inference_mode():
            super().write_rows(slot, as_tensor(rows, self.device))

    def keep(self, slot: int, num_prefix_rows: int, rows: Sequence[int] = ()) -> None:
        """Keep the first rows and then ``rows``, in this order; drop the rest. Raises: see `KVCache.keep`."""
        with torch.inference_mode():
            super().keep(slot, num_prefix_rows, rows)

    def forward(self, extensions: Sequence[Extension]) -> list[Any]:
        """Run the new tokens of several sequences; as `RowRunner.forward`."""
        with torch.inference_mode():
            return super().forward(extensions)

    def _forward(self, extensions: Sequence[Extension]) -> list[Any]:
        return [as_logits(one) for one in super()._forward(extensions)]
