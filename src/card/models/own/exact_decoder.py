"""Exact passes on a CPU: logits whose bits depend on a row's text alone, in 8-bit integers or with stored weights.

A whole pass is one call of machine code (`card.kernels.jit`), made by LLVM when it is first needed. Each row is
computed alone and in the order of its own text, so neither the rows beside it nor its place, tile or thread can change
a bit:

- A linear layer of integers multiplies weights with a scale for each output channel by activations with a scale for
  each 64 of a row. The products of 64 are added as integers, then scaled and added as floats in a fixed order.
- One of floats multiplies weights as they are stored by float32 activations, one multiply-add after the other.
- Attention goes through the positions of a row's own text, whatever rows of the cache hold them. Keys and values are
  kept in float16, those of float32 models in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from card.config import INT8
from card.kernels.machine_code import machine_code
from card.kernels.number_types import FLOAT16, FLOAT32, Array, Floats, empty, zeros
from card.kernels.packed_linear import GROUP, LANES, PANEL, PackedLinear, extended, padded
from card.machine.threads import integer_pass_threads
from card.models.architectures import Architecture
from card.models.architectures.architecture import ACTIVATIONS, NormPlace, head_dim, neighbours_first, rotary_size
from card.models.draft_vocab import head_of, spread
from card.models.features import FINAL, PassStates
from card.models.images import ImageRows
from card.models.layer_kinds import layer_windows
from card.models.own.decoder_model import DecoderLayer, DecoderModel, is_int8, linears_of, release_pages
from card.models.own.exact_layers import (
    angles_of_axes,
    as_stored,
    in_integers,
    layer_norm,
    packed,
    packed_heads,
    products_of,
    rms_norm,
    turning_tables,
    with_padded_heads,
)
from card.models.own.exact_rows import IntArray, NewRows, row_tables
from card.models.own.layers import BlockWeight, EmbeddedRows, Linear
from card.models.protocol import Extension
from card.models.rows.kv_cache import KVLayout, SequenceRows
from card.models.rows.selection import bound_scores

MOST_TILE_ROWS = 16  # of the largest kind of tile
_LEAST_POSITIONS = 512  # that there is room for: it takes 64 KB


def prepare_code(model: DecoderModel) -> None:
    """Have the machine code of a decoder ready, as far as no other process is making it."""
    machine_code("formats").prepare(products_of(model))
    machine_code("passes")


class ExactDecoder:
    """Runs decoders by machine code; `why_not_int8` must have returned None."""

    def __init__(self, model: DecoderModel, max_model_len: int) -> None:
        prepare_code(model)
        self._code, self._sums_bytes = machine_code("tables"), machine_code("vectors").SUMS_BYTES
        self._team = machine_code("passes").ThreadTeam()
        config, architecture = model.config, model.architecture
        self.has_blocks = model.has_blocks
        self._pack = in_integers if is_int8(model) and not self.has_blocks else as_stored
        self.precision = INT8 if is_int8(model) else model.dtype.name
        kv_dtype = FLOAT32 if self.precision == "float32" else FLOAT16
        self._head_size = head_dim(config)
        self._padded_head = padded(self._head_size, LANES)
        self._num_heads, self._num_kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._embedded = EmbeddedRows(model.embeddings)
        self.windows = layer_windows(config, max_model_len)
        self.vocab_size = model.lm_head.out_features
        self._reals = {
            self._code.EPS: float(getattr(config, architecture.norm_eps)),
            self._code.SCALE: architecture.scale("attention", config),
            self._code.SCORE_CAP: architecture.cap("attention", config) or 0.0,
            self._code.LOGIT_CAP: architecture.cap("logits", config) or 0.0,
        }
        self._switches = {
            self._code.KV_BYTES: kv_dtype.itemsize,
            self._code.ACTIVATION: ACTIVATIONS.index(getattr(config, architecture.activation)),
            self._code.CENTRES: architecture.centres,
            self._code.IS_PARALLEL: architecture.is_parallel,
            self._code.HAS_WIDE_NORMS: architecture.has_wide_norms,
        }
        self._norm_offset = architecture.norm_offset
        self._embedding_scale = architecture.embedding_scale(config, model.dtype)
        self._residual_scale = architecture.scale("residual", config)
        self._width = int(config.hidden_size)
        self._held: list[Any] = []  # keeps alive what the tables hold addresses of
        kinds = architecture.rotary_kinds(config)
        turning = [kind for kind in dict.fromkeys(kinds) if kind is not None]
        self._rotations = {kind: turning_tables(model, max_model_len, kind) for kind in turning}
        self._rotary_kinds = kinds
        self._norm = extended(self._norm_weight(model.norm), padded(self._width, GROUP))
        head, self._head_ids = head_of(model)
        self._output = packed(self._pack, head, factor=1 / architecture.scale("logits", config))
        self._num_outputs, self._num_padded_outputs = head.out_features, PANEL * len(self._output.panels)
        tables = []
        for layer, window, kind in zip(model.layers, self.windows, kinds, strict=True):
            tables.append(self._layer(model, layer, window, kind))
            release_pages(model)
        self._pages = model.pages
        self._check_pages()
        self._layers = np.array(tables, np.int64)
        self._turn_by(self._rotations)
        self.layout = KVLayout(len(self._layers), self._num_kv_heads, self._padded_head, kv_dtype)
        self._buffers = _Buffers()
        self._score_room: Floats = np.empty(0, np.float32)  # for scores of rows, as large as a pass has needed it

    def _layer(self, model: DecoderModel, layer: DecoderLayer, window: int | None, rotary: str | None) -> list[int]:
        """Pack a layer and return its table."""
        code, architecture = self._code, model.architecture
        its = linears_of(layer, architecture, model.config)
        heads, kv_heads, size, order = self._num_heads, self._num_kv_heads, self._padded_head, None
        if architecture.turns_neighbours and rotary is not None:
            order = neighbours_first(rotary_size(model.config, rotary), self._head_size)
        linears = {
            code.QUERY: packed_heads(self._pack, its.query, order, heads, size),
            code.KEY: packed_heads(self._pack, its.key, order, kv_heads, size),
            code.VALUE: packed_heads(self._pack, its.value, None, kv_heads, size),
            code.ATTENTION_OUT: self._attention_out(its.out),
            code.GATE: packed(self._pack, its.gate, out_multiple=GROUP),
            code.UP: packed(self._pack, its.up, out_multiple=GROUP),
            code.DOWN: packed(self._pack, its.down, factor=self._residual_scale, out_multiple=GROUP),
        }
        table = [0] * code.LAYER_SIZE
        for place, linear in linears.items():
            table[place : place + code.LINEAR_SIZE] = linear.entry
        kept = self._norms(layer, architecture)
        for place, norm in kept.items():
            table[place] = norm.ctypes.data
        table[code.WINDOW] = window or 0
        if rotary is not None:
            table[code.TURNED] = self._rotations[rotary][0].shape[1]
        self._mlp_width = linears[code.GATE].scales.shape[0]
        self._held += [linears, kept]
        return table

    def _attention_out(self, linear: Linear) -> PackedLinear:
        """Return the layer whose inputs are heads, each followed by zeros up to its padded size."""
        if not isinstance(linear.weight, BlockWeight):
            linear = Linear(with_padded_heads(linear.weight, self._num_heads, 1, self._padded_head), linear.bias)
        return packed(self._pack, linear, factor=self._residual_scale, out_multiple=GROUP)

    def _norm_weight(self, stored: Array) -> Floats:
        """Return the weight of a norm."""
        return stored.astype(np.float32) + np.float32(self._norm_offset)

    def _norms(self, layer: DecoderLayer, architecture: Architecture) -> dict[int, Floats]:
        """Return the weights of a layer's norms by their places in its table."""
        code, width, size = self._code, padded(self._width, GROUP), self._padded_head
        places: dict[NormPlace, tuple[int, int]] = {
            "attention_in": (code.INPUT_NORM, 1),
            "attention_out": (code.ATTENTION_OUT_NORM, 1),
            "mlp_in": (code.MLP_NORM, 1),
            "mlp_out": (code.MLP_OUT_NORM, 1),
            "query": (code.QUERY_NORM, self._num_heads if architecture.has_wide_norms else 1),
            "key": (code.KEY_NORM, self._num_kv_heads if architecture.has_wide_norms else 1),
        }
        norms = {}
        for name, part in architecture.norms.items():
            place, num_heads = places[name]
            weight = self._norm_weight(layer.norms[part.name])
            if name in ("query", "key"):
                norms[place] = with_padded_heads(weight, num_heads, 0, size)
            else:
                norms[place] = extended(weight, width)
        return norms

    def step(self, sequence: SequenceRows, extension: Extension, offset: int) -> NewRows:
        """Prepare the pass of an extension's rows, the newest ones of a sequence."""
        return NewRows(sequence, extension)

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        steps: Sequence[NewRows],
        logits_rows: IntArray | slice,
        states: PassStates | None = None,
        images: ImageRows | None = None,
    ) -> Floats:
        """Return logits [rows, V] of the chosen rows of the pass; token_ids are [sum T] int64.

        Args:
            positions: [sum T] int64; [3, sum T] with images whose ``axes`` say which of them turns a channel.
            states: takes the hidden states that were asked for.
            images: what stands in places of images; None: nothing.
        """
        code, buffers = self._code, self._buffers
        scored = self._make_score_room(steps)
        rows, ancestors = row_tables(steps)
        num_rows, threads = len(rows), integer_pass_threads()
        self._prepare(num_rows, max(row[code.POSITION] for row in rows) + 1, threads)
        buffers.rows[:num_rows] = rows
        if positions.ndim == 2:  # angles for these rows alone
            assert images is not None and images.axes is not None
            axes = images.axes
            self._turn_by({kind: angles_of_axes(two, positions, axes) for kind, two in self._rotations.items()})
            buffers.rows[:num_rows, code.ANGLE] = buffers.numbers[:num_rows]
        elif self._turned_by is not self._rotations:
            self._turn_by(self._rotations)
        hidden = buffers.hidden[:num_rows]
        hidden[:, : self._width] = self._embedded.of([one for step in steps for one in step.extension.token_ids])
        if images is not None and len(images.rows):
            hidden[images.rows, : self._width] = images.features
        if self._embedding_scale != 1.0:
            hidden *= self._embedding_scale
        if isinstance(logits_rows, slice):
            first, end, _ = logits_rows.indices(num_rows)
            num_chosen, chosen_at = end - first, buffers.numbers_at + buffers.numbers.itemsize * first
        else:
            num_chosen, chosen_at = len(logits_rows), logits_rows.ctypes.data
        logits = empty((num_chosen, self._num_padded_outputs))
        table = self._table
        table[code.ROWS], table[code.THREADS] = num_rows, threads
        table[code.ANCESTORS] = ancestors.ctypes.data if len(ancestors) else 0
        table[code.LOGITS] = logits.ctypes.data
        table[code.CHOSEN_ROWS], table[code.NUM_CHOSEN] = chosen_at, num_chosen
        if states:
            self._run_and_take(states, hidden)
        else:
            self._team.run(table)
        self._check_pages()
        for step in scored:
            step.scores = self._scores(step)
        if self._num_outputs < self._num_padded_outputs:
            logits = logits[:, : self._num_outputs]
        return spread(logits, self._head_ids, self.vocab_size)

    def _check_pages(self) -> None:
        """Raise ModelError if weights have changed with the file that they are mapped to."""
        for pages in self._pages:
            pages.check()

    def _turn_by(self, tables: Mapping[str, tuple[Floats, Floats]]) -> None:
        """Let the layers turn heads by these cosines and sines, by their kinds."""
        self._turned_by = tables
        for layer, kind in zip(self._layers, self._rotary_kinds, strict=True):
            if kind is not None:
                layer[self._code.COS], layer[self._code.SIN] = (one.ctypes.data for one in tables[kind])

    def _make_score_room(self, steps: Sequence[NewRows]) -> list[NewRows]:
        """Have room for the scores of those sequences that keep some, and return these."""
        scored = [step for step in steps if step.extension.scores is not None and step.num_held]
        if not scored:
            return scored
        layers, heads = len(self._layers), self._num_heads
        together = max(1, self._code.TOGETHER * self._num_kv_heads // heads)  # rows of a text that are computed at once
        for step in scored:
            step.part = 1 if step.extension.scores == "bounds" else together
        widths = [
            self._padded_head if step.extension.scores == "bounds" else padded(step.num_held, LANES) for step in scored
        ]
        parts = [-(-step.num_new // step.part) for step in scored]
        sizes = [layers * heads * width * num_parts for width, num_parts in zip(widths, parts, strict=True)]
        if len(self._score_room) < sum(sizes):
            self._score_room = empty(sum(sizes))
        rooms = np.split(self._score_room[: sum(sizes)], np.cumsum(sizes)[:-1])
        for step, room, num_parts in zip(scored, rooms, parts, strict=True):
            step.score_room = room.reshape(num_parts, layers, heads, -1)
            for layer, window in enumerate(self.windows):
                if window is not None:
                    step.score_room[:, layer] = 0
        return scored

    def _scores(self, step: NewRows) -> Floats:
        """Return the scores [L, Hkv, S - T] of what a pass has left of one sequence."""
        room = step.score_room
        assert room is not None
        of_heads = room.reshape(*room.shape[:2], self._num_kv_heads, -1, room.shape[-1])
        if step.extension.scores != "bounds":
            return of_heads.sum(0)[..., : step.num_held].mean(2) / np.float32(step.num_new)  # type: ignore[no-any-return]
        queries = of_heads.transpose(1, 2, 0, 3, 4) * np.float32(self._reals[self._code.SCALE])
        keys = step.sequence.kv[:, 0, :, : step.num_held]
        return np.stack([bound_scores(*layer) for layer in zip(queries, keys, strict=True)])

    def _run_and_take(self, states: PassStates, hidden: Floats) -> None:
        """Run the pass and let it copy the wanted states, which the next layer overwrites."""
        copies = {layer: empty(hidden.shape) for layer in states.layers - {0, FINAL}}
        if 0 in states.layers:
            states.take(0, hidden.copy())
        for layer, copy in copies.items():
            self._layers[layer - 1, self._code.COPY_TO] = copy.ctypes.data
        try:
            self._team.run(self._table)
        finally:
            self._layers[:, self._code.COPY_TO] = 0
        for layer, copy in copies.items():
            states.take(layer, copy)
        norm = layer_norm if self._switches[self._code.CENTRES] else rms_norm
        weight, eps = self._norm[: self._width], self._reals[self._code.EPS]
        states.take_final(hidden[:, : self._width], lambda rows: norm(rows, weight, eps))

    def _prepare(self, num_rows: int, num_positions: int, num_threads: int) -> None:
        """Have room for a pass, and a table that says where."""
        buffers = self._buffers
        if not buffers.fits(num_rows, num_positions, num_threads):
            buffers.grow(num_rows, num_positions, num_threads)
            self._make_room()

    def _own_bytes(self) -> int:
        """Return what a thread needs for itself in the largest pass that there is room for."""
        code, buffers, size = self._code, self._buffers, self._padded_head
        groups = max(padded(self._width, GROUP), padded(self._num_heads * size, GROUP)) // GROUP
        attending = 4 * (LANES * size + GROUP)  # of floats; each query has a sum and scores
        most_queries = max(code.TOGETHER, self._num_heads // self._num_kv_heads)
        attending += 4 * most_queries * (padded(size, GROUP) + padded(buffers.num_positions, LANES) + 2 * LANES)
        own = (
            groups * buffers.num_rows * (GROUP + 4 + self._sums_bytes + 4 * GROUP)
            + 4 * GROUP * groups
            + max(attending, 8 * GROUP * MOST_TILE_ROWS)
        )
        return padded(own, 4 * GROUP)

    def _make_room(self) -> None:
        """Make buffers of the sizes now needed, and the table of a pass with their addresses."""
        code, buffers, own_bytes = self._code, self._buffers, self._own_bytes()
        width, size = padded(self._width, GROUP), self._padded_head
        attended = padded(self._num_heads * size, GROUP)
        buffers.hidden = zeros((buffers.num_rows, width), np.float32)
        mlp_groups, gated_bytes = self._mlp_width // GROUP, self._sums_bytes + 4 * GROUP  # sums, and floats behind them
        num_rows, projected = buffers.num_rows, (self._num_heads + 2 * self._num_kv_heads) * size
        parts: dict[int, Array] = {
            code.PROJECTED: empty((num_rows, projected), np.float32),
            code.ATTENDED: zeros((num_rows, attended), np.float32),
            code.GATED: empty((num_rows, self._mlp_width), np.int8),
            code.GATED_SCALES: empty((num_rows, mlp_groups), np.float32),
            code.GATED_SUMS: empty((num_rows, mlp_groups, gated_bytes), np.int8),
            code.OWN: empty((buffers.num_threads, own_bytes), np.int8),
            code.HIDDEN: buffers.hidden,
            code.ADDED: empty(buffers.hidden.shape),
            code.NORM: self._norm,
            code.ROW_TABLE: empty((num_rows, code.ROW_SIZE), np.int64),
        }
        buffers.parts, buffers.rows = parts, parts[code.ROW_TABLE]
        buffers.numbers = np.arange(num_rows)
        buffers.numbers_at = buffers.numbers.ctypes.data
        table = (ctypes.c_int64 * code.TABLE_SIZE)()
        for place, part in parts.items():
            table[place] = part.ctypes.data
        table[code.OUTPUT : code.OUTPUT + code.LINEAR_SIZE] = self._output.entry
        table[code.LAYER_TABLE], table[code.OWN_BYTES] = self._layers.ctypes.data, own_bytes
        numbers = {
            code.LAYERS: len(self._layers),
            code.WIDTH: self._width,
            code.PADDED_WIDTH: width,
            code.HEADS: self._num_heads,
            code.KV_HEADS: self._num_kv_heads,
            code.HEAD: self._head_size,
            code.PADDED_HEAD: size,
            code.MLP: self._mlp_width,
            **self._switches,
            code.VOCAB: self._num_padded_outputs,
        }
        for place, number in numbers.items():
            table[place] = number
        for place, real in self._reals.items():
            ctypes.c_float.from_buffer(table, 8 * place).value = real
        self._table = table


class _Buffers:
    """Buffers of the passes, for as many rows as they have room for."""

    def __init__(self) -> None:
        self.num_rows = self.num_positions = self.num_threads = 0
        self.hidden: Floats = np.zeros((0, 0), np.float32)
        self.parts: dict[int, Array] = {}
        self.rows: IntArray = np.zeros((0, 0), np.int64)  # the table of rows, one of the parts
        self.numbers: IntArray = np.zeros(0, np.int64)  # of rows: 0, 1, 2, ...
        self.numbers_at = 0  # their address

    def fits(self, num_rows: int, num_positions: int, num_threads: int) -> bool:
        return num_rows <= self.num_rows and num_positions <= self.num_positions and num_threads <= self.num_threads

    def grow(self, num_rows: int, num_positions: int, num_threads: int) -> None:
        self.num_rows = padded(max(num_rows, self.num_rows), MOST_TILE_ROWS)
        if num_positions > self.num_positions:
            self.num_positions = max(_LEAST_POSITIONS, 2 * num_positions)  # a text grows by a token each time
        self.num_threads = max(num_threads, self.num_threads)
