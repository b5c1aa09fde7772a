"""The head of a decoder as its passes compute it: of all tokens, or of some and of those that were read last.

A draft model that proposes a part of the vocabulary misses names, and words of languages that few texts use. So the
tokens that its passes read, those of prompts and of texts as they grow, join its head, for all texts of the model.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from card.kernels.number_types import Floats, empty
from card.kernels.packed_linear import PANEL, PackedLinear, padded
from card.models.draft_vocab import head_channels
from card.models.own.decoder_model import DecoderModel
from card.models.own.exact_layers import Pack, packed
from card.models.rows.row_tree import IntArray

NUM_JOINING = 1024  # most tokens that join; then the first of them makes way


class OutputHead:
    """The packed head of a model, and the tokens that its outputs are for."""

    def __init__(self, model: DecoderModel, pack: Pack) -> None:
        """Pack the head of a model, unless another model has packed it."""
        self._layer, self._pack = model.lm_head, pack
        self._factor = 1 / model.architecture.scale("logits", model.config)
        self._vocab_size, ids = int(model.embeddings.shape[0]), model.output_ids
        self._ids = ids  # [outputs]; None: all in order
        self._joining: _Joining | None = None
        if (channels := head_channels(model)) is None:
            lent = model.packed_head if ids is None else None
            self.linear: PackedLinear = lent or packed(pack, self._layer, factor=self._factor)
            return
        tokens = np.arange(self._layer.out_features) if ids is None else ids
        self._joining = _Joining(tokens, channels, self._vocab_size)
        self._ids = self._joining.ids
        self.linear = self._packed(self._joining.channels)

    @property
    def can_join(self) -> bool:
        """Return whether tokens that passes read join it: it has no more than some."""
        return self._joining is not None

    def read(self, token_ids: Iterable[int]) -> None:
        """Let tokens that the next pass reads be among those that it may propose."""
        if self._joining is None or not (panels := self._joining.join(token_ids)):
            return
        part = self._packed(self._joining.channels.reshape(-1, PANEL)[panels].ravel())
        self.linear.panels[panels] = part.panels
        for values, new in ((self.linear.scales, part.scales), (self.linear.bias, part.bias)):
            values.reshape(-1, PANEL)[panels] = new.reshape(-1, PANEL)

    def logits(self, outputs: Floats) -> Floats:
        """Return logits [rows, V] of the outputs [rows, padded]; those of tokens without one are minus infinity."""
        ids = self._ids
        if ids is None:
            num_outputs = self._layer.out_features
            return outputs if num_outputs == outputs.shape[1] else outputs[:, :num_outputs]
        whole = empty((len(outputs), self._vocab_size))
        whole.fill(-np.inf)
        whole[:, ids] = outputs[:, : len(ids)]
        return whole

    def _packed(self, channels: IntArray) -> PackedLinear:
        return packed(self._pack, self._layer.select(channels), factor=self._factor)


class _Joining:
    """The channels of a head that are computed: some always, and behind them those of tokens that have joined."""

    def __init__(self, tokens: IntArray, always: IntArray, vocab_size: int) -> None:
        """Take the tokens [channels] of a head, and the channels that are always computed."""
        self._first, self._num_joined = padded(len(always), PANEL), 0
        self._room = min(NUM_JOINING, padded(len(tokens) - len(always), PANEL))
        self.channels = np.resize(always, self._first + self._room)  # no place is empty: some stand there twice
        self.ids = tokens[self.channels]
        self._channel_of = np.full(vocab_size, -1)
        self._channel_of[tokens] = np.arange(len(tokens))
        self._is_there = self._channel_of < 0  # or can never be
        self._is_there[tokens[always]] = True

    def join(self, token_ids: Iterable[int]) -> list[int]:
        """Take in those that are not there, in the place of the first that joined; return the panels that changed."""
        new = [token for token in dict.fromkeys(token_ids) if not self._is_there[token]][-self._room :]
        panels = set[int]()
        for token in new:
            place = self._first + self._num_joined % self._room
            if self._num_joined >= self._room:
                self._is_there[self.ids[place]] = False
            self._num_joined += 1
            self.channels[place], self.ids[place], self._is_there[token] = self._channel_of[token], token, True
            panels.add(place // PANEL)
        return sorted(panels)
