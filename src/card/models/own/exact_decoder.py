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
from collections.abc import Sequence

import numpy as np

from card.config import INT8
from card.kernels.jit.tables import CLAMPED, LayerTable, PassTable, RowTable
from card.kernels.machine_code import machine_code
from card.kernels.number_types import FLOAT16, FLOAT32, Array, Floats, empty, zeros
from card.kernels.packed_linear import GROUP, LANES, PANEL, extended, padded
from card.machine.threads import integer_pass_threads
from card.models.architectures.architecture import ACTIVATIONS
from card.models.features import FINAL, RAW, PassStates
from card.models.images import ImageRows
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.own.exact_layers import (
    as_stored,
    check_numbers,
    in_integers,
    layer_norm,
    norm_weight,
    products_of,
    rms_norm,
)
from card.models.own.exact_rows import IntArray, NewRows, input_tables, row_tables
from card.models.own.expert_tables import expert_facts
from card.models.own.layer_input_tables import LayerInputTables
from card.models.own.layer_tables import LayerTables
from card.models.own.layers import EmbeddedRows
from card.models.own.output_head import OutputHead
from card.models.own.state_steps import state_steps, step_table, taking_steps
from card.models.protocol import Extension
from card.models.rows.kv_cache import SequenceRows
from card.models.rows.row_tree import BoolArray
from card.models.rows.selection import bound_scores

_NO_INPUTS: IntArray = np.zeros((0, 0), np.int64)
MOST_TILE_ROWS = 16  # of the largest kind of tile
_LEAST_POSITIONS = 512  # that there is room for: it takes 64 KB


def prepare_code(model: DecoderModel) -> None:
    """Have the machine code of a decoder ready, as far as no other process is making it."""
    machine_code("formats").prepare(products_of(model))
    machine_code("team")


class ExactDecoder:
    """Runs decoders by machine code; `why_not_int8` must have returned None."""

    def __init__(self, model: DecoderModel, max_model_len: int) -> None:
        prepare_code(model)
        self._sums_bytes = machine_code("vectors").SUMS_BYTES
        self._team = machine_code("team").ThreadTeam()
        config, architecture = model.config, model.architecture
        self.has_blocks = model.has_blocks
        self.precision = INT8 if is_int8(model) else model.dtype.name
        kv_dtype = FLOAT32 if self.precision == "float32" else FLOAT16
        self._embedded = EmbeddedRows(model.embeddings)
        self.vocab_size = int(model.embeddings.shape[0])
        self._reals = {
            "eps": float(getattr(config, architecture.norm_eps)),
            "score_cap": architecture.cap("attention", config) or 0.0,
            "logit_cap": architecture.cap("logits", config) or 0.0,
        }
        self._switches = {
            "kv_bytes": kv_dtype.itemsize,
            "activation": (
                CLAMPED if architecture.clamps_gate else ACTIVATIONS.index(architecture.gate_activation(config))
            ),
            "centres": architecture.centres,
            "is_parallel": architecture.is_parallel,
            "has_wide_norms": architecture.has_wide_norms,
        }
        self._embedding_scale = architecture.embedding_scale(config, model.dtype)
        self._width = int(config.hidden_size)
        self._norm = extended(norm_weight(model.norm, architecture.norm_offset), padded(self._width, GROUP))
        layer_inputs = model.layer_inputs
        check_numbers(model, (*model.ending, *(() if layer_inputs is None else layer_inputs.packed_weights)))
        pack = in_integers if is_int8(model) and not self.has_blocks else as_stored
        self._output = OutputHead(model, pack)
        self.head = self._output.linear
        self._inputs = None if layer_inputs is None else LayerInputTables(model, layer_inputs, pack)
        self._layers = LayerTables(model, pack, max_model_len, kv_dtype)
        self.windows, self.layout, self.record = self._layers.windows, self._layers.layout, self._layers.record
        self.state_size = self._layers.state_size  # numbers of the states of a sequence
        self._layers.tables[:1, LayerTable.adds_heads] = model.adds_heads
        self._num_sums = self._layers.projected if model.adds_heads else 0  # behind an input of a row
        # Rows without logits need no more of the last layer than keys and values.
        self._ends_apart = (
            len(self._layers) > 1 and self._layers.shapes[-1].mixer == "attention" and self._inputs is None
        )
        self.long_rows: BoolArray | None = None
        self._pages = model.pages
        self._check_pages()
        self.experts = expert_facts(self._layers.shapes)  # None: there are none
        self.experts_read = 0  # different ones that rows have chosen, by the last pass, all layers together
        self._buffers = _Buffers()
        self._score_room: Floats = np.empty(0, np.float32)  # for scores of rows, as large as a pass has needed it

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
        buffers = self._buffers
        scored = self._make_score_room(steps)
        sequences = state_steps(steps) if self.state_size else []  # before the tables, which say where records go
        inputs = input_tables(steps) if self.record[1] else _NO_INPUTS
        state_table = step_table(sequences)
        rows, ancestors = row_tables(steps)
        num_rows, threads = len(rows), integer_pass_threads()
        self._prepare(num_rows, max(row[RowTable.position] for row in rows) + 1, threads)
        buffers.rows[:num_rows] = rows
        self._turn(buffers.rows[:num_rows, RowTable.angle], positions, images)
        hidden = buffers.hidden[:num_rows]
        ids = [one for step in steps for one in step.extension.token_ids]
        self._output.read(ids)
        hidden[:, self._width :] = 0.0  # a pass that gave NaN would otherwise leave it to all passes behind it
        if self._inputs is not None:
            self._inputs.take(ids)
        self._put_inputs(hidden, ids, images)
        if self._embedding_scale != 1.0:
            hidden *= self._embedding_scale
        if isinstance(logits_rows, slice):
            first, end, _ = logits_rows.indices(num_rows)
            num_chosen, chosen_at = end - first, buffers.numbers_at + buffers.numbers.itemsize * first
        else:
            num_chosen, chosen_at = len(logits_rows), logits_rows.ctypes.data
            first = int(logits_rows[0]) if num_chosen else num_rows
        outputs = empty((num_chosen, PANEL * len(self.head.panels)))
        table = self._table
        table[PassTable.num_rows], table[PassTable.num_threads] = num_rows, threads
        table[PassTable.ancestors] = ancestors.ctypes.data if len(ancestors) else 0
        table[PassTable.conv_tables], table[PassTable.conv_size] = inputs.ctypes.data, inputs.shape[1]
        table[PassTable.logits] = outputs.ctypes.data
        table[PassTable.chosen_rows], table[PassTable.num_chosen] = chosen_at, num_chosen
        table[PassTable.steps], table[PassTable.num_steps] = state_table.ctypes.data, len(state_table)
        table[PassTable.experts_read] = 0
        for step in steps:
            if step.sequence.records is not None:
                step.sequence.records.make_way(step.sequence.tree.num_rows)
        with taking_steps(sequences):
            if states:
                self._run_and_take(states, hidden)
            else:
                self._run(0 if scored else first, logits_rows)
        self.experts_read = int(table[PassTable.experts_read])
        self._check_pages()
        for step in scored:
            step.scores = self._scores(step)
        return self._output.logits(outputs)

    def _put_inputs(self, hidden: Floats, ids: Sequence[int], given: ImageRows | None) -> None:
        """Put embeddings or given inputs of rows in place, and the sums that queries, keys and values begin from."""
        if given is None or len(given.rows) < len(hidden):
            hidden[:, : self._width] = self._embedded.of(ids)
        sums = self._buffers.parts["projected"][: len(hidden)]
        if self._num_sums:
            sums[:] = 0.0
        if given is None or not len(given.rows):
            return
        hidden[given.rows, : self._width] = given.features[:, : self._width]
        if self._num_sums:
            sums[given.rows] = given.features[:, self._width :]

    def _turn(self, angles: IntArray, positions: IntArray, images: ImageRows | None) -> None:
        """Say where the angles of each row are; ``angles`` [rows] has those of its position."""
        if positions.ndim == 2:  # for these rows alone
            assert images is not None and images.axes is not None
            self._layers.turn(positions, images.axes)
            angles[:] = self._buffers.numbers[: len(angles)]
            return
        self._layers.turn()
        if self.long_rows is not None:
            angles += self.long_rows * self._layers.first_long

    def _check_pages(self) -> None:
        """Raise ModelError if weights have changed with the file that they are mapped to."""
        for pages in self._pages:
            pages.check()

    def _make_score_room(self, steps: Sequence[NewRows]) -> list[NewRows]:
        """Have room for the scores of those sequences that keep some, and return these."""
        scored = [step for step in steps if step.extension.scores is not None and step.num_held]
        if not scored:
            return scored
        alike, shape = self._layers.alike, self.layout.shape
        layers, heads, together = len(self.layout.layers), alike.num_heads, self._layers.rows_together(alike)
        for step in scored:
            step.part = 1 if step.extension.scores == "bounds" else together
        widths = [
            shape.head_size if step.extension.scores == "bounds" else padded(step.num_held, LANES) for step in scored
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
        of_heads = room.reshape(*room.shape[:2], self.layout.shape.num_kv_heads, -1, room.shape[-1])
        if step.extension.scores != "bounds":
            return of_heads.sum(0)[..., : step.num_held].mean(2) / np.float32(step.num_new)  # type: ignore[no-any-return]
        queries = of_heads.transpose(1, 2, 0, 3, 4) * self._layers.scale
        keys = np.concatenate([span.runs[0][:, 0, :, span.inside] for span in step.sequence.spans(0, step.num_held)], 2)
        return np.stack([bound_scores(*layer) for layer in zip(queries, keys, strict=True)])

    def _run(self, first: int, logits_rows: IntArray | slice) -> None:
        """Run the pass; rows before ``first`` have no logits, so of the last layer only their keys and values count."""
        table, all_rows = self._table, self._table[PassTable.num_rows]
        if not self._ends_apart or first < MOST_TILE_ROWS:
            self._team.run(table)
            return
        table[PassTable.keeps_alone], table[PassTable.num_chosen] = 1, 0
        try:
            self._team.run(table)
        finally:
            table[PassTable.keeps_alone] = 0
        if first == all_rows:
            return
        ending, chosen = type(table).from_buffer_copy(table), self._buffers.numbers[:all_rows][logits_rows] - first
        ending[PassTable.first_layer], ending[PassTable.num_rows] = len(self._layers) - 1, all_rows - first
        ending[PassTable.hidden] += first * self._buffers.hidden.strides[0]
        ending[PassTable.rows] += first * self._buffers.rows.strides[0]
        ending[PassTable.chosen_rows], ending[PassTable.num_chosen] = chosen.ctypes.data, len(chosen)
        self._team.run(ending)
        table[PassTable.experts_read] = ending[PassTable.experts_read]

    def _run_and_take(self, states: PassStates, hidden: Floats) -> None:
        """Run the pass and let it copy the wanted states, which the next layer overwrites."""
        copies = {layer: empty(hidden.shape) for layer in states.layers - {0, FINAL, RAW}}
        if 0 in states.layers:
            states.take(0, hidden.copy())
        for layer, copy in copies.items():
            self._layers.tables[layer - 1, LayerTable.copy_to] = copy.ctypes.data
        try:
            self._team.run(self._table)
        finally:
            self._layers.tables[:, LayerTable.copy_to] = 0
        for layer, copy in copies.items():
            states.take(layer, copy)
        norm = layer_norm if self._switches["centres"] else rms_norm
        weight, eps = self._norm[: self._width], self._reals["eps"]
        states.take_final(hidden[:, : self._width], lambda rows: norm(rows, weight, eps))

    def _prepare(self, num_rows: int, num_positions: int, num_threads: int) -> None:
        """Have room for a pass, and a table that says where."""
        buffers = self._buffers
        if not buffers.fits(num_rows, num_positions, num_threads):
            buffers.grow(num_rows, num_positions, num_threads)
            self._make_room()

    def _own_bytes(self) -> int:
        """Return what a thread needs for itself in the largest pass that there is room for."""
        layers, buffers = self._layers, self._buffers
        size = max((layer.head_size for layer in self.layout.layers), default=0)
        of_inputs = 0 if self._inputs is None else self._inputs.padded_width
        groups = max(padded(self._width, GROUP), layers.attended, of_inputs) // GROUP
        attending = 4 * (LANES * size + GROUP)  # of floats; each query lies there transposed, and has a sum and scores
        of_query = 2 * padded(size, GROUP) + padded(buffers.num_positions, LANES) + 2 * LANES
        attending += 4 * layers.most_together * of_query
        panels = 0  # of expanded panels: of gate and up, or of down
        if buffers.num_rows > MOST_TILE_ROWS:
            of_mlps = max(layers.mlp_widths, default=0) // GROUP
            panels = GROUP // PANEL * max(2 * groups, of_mlps) * machine_code("expanded_tiles").MOST_EXPANDED_BYTES
        num_bytes = (
            groups * buffers.num_rows * (GROUP + 4 + self._sums_bytes + 4 * GROUP)
            + 4 * GROUP * groups
            + max(attending, 8 * GROUP * MOST_TILE_ROWS + panels, layers.state_room)
        )
        return padded(num_bytes, 4 * GROUP)

    def _expert_bytes(self) -> int:
        """Return what a thread needs besides, if there are experts."""
        rooms, width = self._layers.expert_rooms, padded(self._width, GROUP)
        room_for = machine_code("expert_rows").room_for_experts
        needed = (room_for(self._buffers.num_rows, room.listed, room.taken, width) for room in rooms)
        return padded(max(needed, default=0), 4 * GROUP)

    def _make_room(self) -> None:
        """Make buffers of the sizes now needed, and the table of a pass with their addresses."""
        buffers, layers = self._buffers, self._layers
        width, num_rows, experts_at = padded(self._width, GROUP), buffers.num_rows, self._own_bytes()
        own_bytes = experts_at + self._expert_bytes()
        buffers.hidden = zeros((num_rows, width), np.float32)
        mlp_width = max([*layers.mlp_widths, *(room.gated for room in layers.expert_rooms)])
        scores = max((room.scores for room in layers.expert_rooms), default=0)
        mlp_groups, gated_bytes = mlp_width // GROUP, self._sums_bytes + 4 * GROUP  # sums, and floats behind them
        parts: dict[str, Array] = {
            "projected": empty((num_rows, layers.projected)),
            "attended": empty((num_rows, layers.attended)),
            "gated": empty((num_rows, mlp_width), np.int8),
            "gated_scales": empty((num_rows, mlp_groups), np.float32),
            "gated_sums": empty((num_rows, mlp_groups, gated_bytes), np.int8),
            "scratch": empty((buffers.num_threads, own_bytes), np.int8),
            "hidden": buffers.hidden,
            "added": empty(buffers.hidden.shape),
            "routed": empty((num_rows, scores)),
            "expert_sums": empty((num_rows if layers.has_both else 0, width)),
            "norm": self._norm,
            "rows": empty((num_rows, RowTable.size), np.int64),
        }
        if self._inputs is not None:
            parts |= self._inputs.make_room(num_rows)
        buffers.parts, buffers.rows = parts, parts["rows"]
        buffers.numbers = np.arange(num_rows)
        buffers.numbers_at = buffers.numbers.ctypes.data
        entries = {
            **parts,
            **self._reals,
            **self._switches,
            "output": self.head,
            "layers": layers.tables,
            "scratch_bytes": own_bytes,
            "experts_at": experts_at,
            "num_layers": len(layers),
            "width": self._width,
            "padded_width": width,
            "num_outputs": PANEL * len(self.head.panels),
        }
        self._table = (ctypes.c_int64 * PassTable.size)()
        PassTable.write(self._table, entries)
        if self._inputs is not None:
            self._inputs.fill(self._table)


class _Buffers:
    """Buffers of the passes, for as many rows as they have room for."""

    def __init__(self) -> None:
        self.num_rows = self.num_positions = self.num_threads = 0
        self.hidden: Floats = np.zeros((0, 0), np.float32)
        self.parts: dict[str, Array] = {}
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
