"""Any transformers causal LM through its own modules, with our attention over our KV caches."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from card.backends.transformers.arrays import TorchLayout, as_array, as_tensor, restricted
from card.backends.transformers.attention import SequencePass, sequence_pass
from card.backends.transformers.long_rope import LongRope
from card.backends.transformers.query_scales import QueryScales
from card.backends.transformers.replaced_attention import (
    AttentionPass,
    AttentionProbe,
    OutsidePassError,
    TakenAttention,
)
from card.backends.transformers.shared_attention import SharedAttention
from card.errors import ModelError, in_few_words
from card.models.draft_vocab import kept_ids
from card.models.features import PassStates
from card.models.images import ImageRows
from card.models.layer_kinds import WITH_CHUNKS, WITHOUT_ATTENTION, layer_kinds, layer_windows
from card.models.long_texts import switch_len
from card.models.names import OTHER_FAMILY, model_name
from card.models.protocol import Extension
from card.models.rows.kv_cache import SequenceRows
from card.models.rows.row_tree import BoolArray, Chunk, IntArray, Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OWN_ATTENTION = "{} models compute attention in code of their own, which cannot be taken over"


def _layer_chunks(config: Any, max_model_len: int) -> list[Chunk | None]:
    """Return the chunks of each layer; None if it has none or one holds every text."""
    size = getattr(config, "attention_chunk_size", None)
    chunk = Chunk(size) if size is not None and size < max_model_len else None
    return [chunk if kind in WITH_CHUNKS else None for kind in layer_kinds(config)]


def _layer_views(config: Any, max_model_len: int) -> list[Window]:
    windows, chunks = layer_windows(config, max_model_len), _layer_chunks(config, max_model_len)
    return [chunk or window for chunk, window in zip(chunks, windows, strict=True)]


def require_causal(model: Any) -> None:
    """Raise ModelError, with the reason, unless the model continues text on one device."""
    config = model.config.get_text_config()
    name = model_name(model)
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model; {OTHER_FAMILY}")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise ModelError(f"{name} attends in both directions; {OTHER_FAMILY}")
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        raise ModelError(f"{name} is spread over {', '.join(sorted(devices))}; put it on one device")


class GenericDecoder:
    """Runs a transformers model's own forward with our attention, which stays installed until `release`."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.model = model
        config = model.config.get_text_config()
        self.windows = _layer_views(config, max_model_len)
        attending = [layer for layer, kind in enumerate(layer_kinds(config)) if kind not in WITHOUT_ATTENTION]
        self._places = {layer: place for place, layer in enumerate(attending)}  # in the KV cache
        length = switch_len(model, max_model_len)
        self._long_rope = None if length is None else LongRope(model, length)
        self._query_scales, self._shared_attention = QueryScales(model), SharedAttention(model)
        self.long_rows: BoolArray | None = None  # [sum T] of the next pass: True for rows of long texts; None: no row
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._attention = TakenAttention(model)
        try:
            self._probe(model)
        except BaseException:
            self.release()
            raise

    def _probe(self, model: PreTrainedModel) -> None:
        self._take_over()
        probe = AttentionProbe()
        try:
            logits = self._trial_logits(model, probe)
            if self._places:
                self.layout, self.group = probe.layout(list(self._places))
            else:  # a state is all that it keeps
                self.layout, self.group = TorchLayout((), logits.dtype, logits.device), 1
        except ModelError as error:
            raise ModelError(f"{model_name(model)} cannot be run: {error}; {OTHER_FAMILY}") from error
        self._needs_bias = probe.needs_bias
        self.vocab_size = int(logits.shape[-1])

    def _trial_logits(self, model: PreTrainedModel, probe: AttentionProbe) -> Tensor:
        """Return the logits of one token. Raises: ModelError with only the reason."""
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        own_attention = _OWN_ATTENTION.format(model.config.get_text_config().model_type)
        try:
            logits: Tensor = model(input_ids=token, position_ids=token, use_cache=False, card_pass=probe).logits
        except OutsidePassError as error:
            raise ModelError("it does not hand arguments on to its attention") from error
        except ModelError:
            raise
        except Exception as error:  # an architecture's code may raise any type
            if self._places and not probe.layers:
                raise ModelError(own_attention) from error
            raise ModelError(f"a trial pass failed: {in_few_words(error)}") from error
        if self._places and not probe.layers:
            raise ModelError(own_attention)
        return logits

    def _take_over(self) -> None:
        self._attention.take_over()
        self._query_scales.leave_to_model(False)
        self._shared_attention.take_over()

    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits of a text by transformers' own forward, [T, V]."""
        self.release()
        try:
            out = self.model(input_ids=torch.tensor([list(token_ids)], device=self.model.device), use_cache=False)
        finally:
            self._take_over()
        logits: Tensor = out.logits[0]
        return logits

    @contextlib.contextmanager
    def narrowed(self, size: int) -> Iterator[None]:
        """Let windows and chunks hold ``size`` tokens within a ``with`` block, so that a short text outgrows them.

        Nothing changes where the model's own hold every text anyway.
        """
        if not any(self.windows):
            yield
            return
        config = self.model.config.get_text_config()
        names = ("sliding_window", "attention_chunk_size")
        set_values = {name: value for name in names if (value := getattr(config, name, None)) is not None}
        before = self.windows
        try:
            for name in set_values:
                setattr(config, name, size)
            self.windows = _layer_views(config, size + 1)
            yield
        finally:
            self.windows = before
            for name, value in set_values.items():
                setattr(config, name, value)

    def release(self) -> None:
        """Restore the model's own attention; no pass runs here afterwards."""
        self._attention.release()
        self._query_scales.leave_to_model(True)
        self._shared_attention.release()

    def step(self, sequence: SequenceRows, extension: Extension, offset: int) -> SequencePass:
        """Prepare the pass of an extension's rows, the newest ones; ``offset`` is that of their first among all."""
        return sequence_pass(
            sequence, extension, offset, group=self.group, windows=self.windows, needs_bias=self._needs_bias
        )

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        steps: Sequence[SequencePass],
        logits_rows: IntArray | slice,
        states: PassStates | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Return logits [rows, V] of the chosen rows of the pass; token_ids and positions are [sum T] int64.

        ``states`` receives the wanted hidden states; ``images`` has the embeddings at places of images.
        Raises: ModelError if the model does not return these states.
        """
        device = self.model.device
        ids, places = as_tensor(token_ids, device), as_tensor(positions, device)
        scales = self._query_scales.of(places)
        extra: dict[str, Any] = {"card_pass": AttentionPass(steps, self.windows, self.layout, self._places, scales)}
        if states:
            extra["output_hidden_states"] = True
        if not isinstance(logits_rows, slice):
            if self._selects_rows:
                extra["logits_to_keep"] = as_tensor(logits_rows, device)
                logits_rows = slice(None)
        elif self._selects_rows and logits_rows.start:
            num_kept = len(token_ids) - int(logits_rows.start)
            extra["logits_to_keep"] = max(num_kept, 1)  # 0 means all
            logits_rows = slice(1 if num_kept == 0 else 0, None)
        rotation: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._long_rope is not None and self.long_rows is not None:
            rotation = self._long_rope.choosing(self.long_rows)
        with rotation:
            if images is None or not len(images.rows):
                extra["input_ids"] = ids[None]
            else:
                embeddings = self.model.get_input_embeddings()(ids)
                embeddings[as_tensor(images.rows, device)] = as_tensor(images.features, device).to(embeddings.dtype)
                extra["inputs_embeds"] = embeddings[None]
            out = self.model(position_ids=places[None], use_cache=False, **extra)
        if states:
            self._hand_over(out.hidden_states, states)
        logits: Tensor = out.logits[0]
        rows = logits_rows if isinstance(logits_rows, slice) else as_tensor(logits_rows, device)
        return restricted(logits[rows], kept_ids(self.model))

    def _hand_over(self, given: Sequence[Tensor] | None, states: PassStates) -> None:
        """Pass on the hidden states of a pass, [1, sum T, D or more] each."""
        num_layers = self.model.config.get_text_config().num_hidden_layers
        if given is None or len(given) != num_layers + 1:
            raise ModelError(
                f"{model_name(self.model)} gives {len(given or ())} hidden states where transformers' models give"
                f" {num_layers + 1}; features of it cannot be kept"
            )
        for layer in states.layers:
            states.take(layer, as_array(given[layer][0]))
