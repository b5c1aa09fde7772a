"""Tables of a decoder's layers: packed weights, norms, angles and shapes, as the machine code reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from card.errors import ModelError
from card.kernels.machine_code import machine_code
from card.kernels.number_types import Array, Dtype, Floats
from card.kernels.packed_linear import GROUP, LANES, PANEL, PackedLinear, extended, padded
from card.kernels.rotation import query_growth
from card.models.architectures.architecture import (
    NormPlace,
    VectorPlace,
    neighbours_first,
    rotary_parameters,
    rotary_size,
)
from card.models.layer_kinds import layer_windows
from card.models.layer_shape import LayerShape
from card.models.long_texts import switch_len
from card.models.own.decoder_model import DecoderLayer, DecoderModel, Linears, linears_of, release_pages
from card.models.own.exact_layers import (
    Pack,
    angles_of_axes,
    check_numbers,
    norm_weight,
    packed,
    packed_heads,
    packed_scores,
    rates_of,
    turning_tables,
    with_padded_heads,
)
from card.models.own.exact_rows import IntArray
from card.models.own.expert_tables import ExpertRoom, expert_table, stand_beside
from card.models.own.layer_input_tables import factor_at, own_input_table
from card.models.own.layers import BlockWeight, Linear
from card.models.rows.kv_cache import KVLayout, KVShape


class _Heads(NamedTuple):
    """Room of a row in a layer: numbers of heads, as `card.kernels.jit.tables` names them, of one padded size."""

    query: int
    key: int
    size: int
    out: int
    more: int = 0
    spare: int = 0

    @property
    def all(self) -> int:
        """Their sum."""
        return self.query + 2 * self.key + self.more + self.spare


Rotation = tuple[str, int]  # a kind of angles, and the size of the heads that turn by them


class LayerTables:
    """The layers of a decoder, packed, each with a table of its own."""

    def __init__(self, model: DecoderModel, pack: Pack, max_model_len: int, kv_dtype: Dtype) -> None:
        """Pack the layers; ``kv_dtype`` is that of keys and values in the cache."""
        self._code, self._pack = machine_code("tables"), pack
        self._config, self._architecture = model.config, model.architecture  # not the model, whose weights go
        config, architecture = model.config, model.architecture
        self._residual_scale = architecture.scale("residual", config)
        self._held: list[Any] = []  # keeps alive what the tables hold addresses of
        self.shapes: list[LayerShape] = [layer.shape for layer in model.layers]
        self._width = int(config.hidden_size)
        self._attending = [idx for idx, one in enumerate(self.shapes) if one.mixer == "attention"]
        self._keeping = [idx for idx in self._attending if self.shapes[idx].kv_source is None]
        self._summing = [idx for idx, one in enumerate(self.shapes) if one.mixer != "attention"]
        its = [self.shapes[idx] for idx in self._keeping]
        self.layout = KVLayout(tuple(KVShape(one.num_kv_heads, padded_head(one)) for one in its), kv_dtype)
        self._windows, self._num_positions = layer_windows(config, max_model_len), max_model_len
        kinds = zip(architecture.rotary_kinds(config), self.shapes, strict=True)
        self._kinds: list[Rotation | None] = [None if kind is None else (kind, one.head_size) for kind, one in kinds]
        turning = [kind for kind in dict.fromkeys(self._kinds) if kind is not None]
        length = switch_len(model, max_model_len)
        # The row of the angles of position 0 in long texts; those of short ones come first.
        self.first_long = length or 0
        self._rotations = {kind: turning_tables(model, max_model_len, *kind, length) for kind in turning}
        self._turned_by: Mapping[Rotation, tuple[Floats, Floats]] = {}
        self.mlp_widths: list[int] = []  # with their padding
        self.expert_rooms: list[ExpertRoom] = []  # of the layers that have experts
        tables = []
        for idx, layer in enumerate(model.layers):
            check_numbers(model, model.weights_of(idx))
            tables.append(self._table(idx, layer))
            release_pages(model)
        self.tables: IntArray = np.array(tables, np.int64)
        for table, shape in zip(self.tables.view(np.float32), self.shapes, strict=True):
            table[2 * self._code.SCALE] = architecture.scale("attention", config, shape.head_size**-0.5)
        self.turn()

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.tables)

    @property
    def windows(self) -> list[int | None]:
        """The windows of the layers that keep keys."""
        return [self._windows[idx] for idx in self._keeping]

    @property
    def record(self) -> tuple[int, int]:
        """Numbers that layers take in of a row, all together, and how many of its last ancestors they need; or 0."""
        taps = (self.shapes[idx].num_taps - 1 for idx in self._summing)
        return sum(self._record_size(idx) for idx in self._summing), max(taps, default=0)

    def _record_size(self, idx: int) -> int:
        """Return the numbers of a layer's part of a record."""
        heads = self._heads(self.shapes[idx])
        return (heads.query + heads.spare) * heads.size

    @property
    def state_size(self) -> int:
        """Numbers of the states of a text, of all layers together; 0 if there are none."""
        return self._states_before(len(self.shapes))

    def _states_before(self, idx: int) -> int:
        return sum(shape.delta.state_size for shape in self.shapes[:idx] if shape.delta is not None)

    @property
    def has_both(self) -> bool:
        """True if a layer has experts beside an MLP."""
        return any(shape.experts is not None and shape.mlp_width for shape in self.shapes)

    @property
    def alike(self) -> LayerShape:
        """The shape of all layers that attend. Raises: ModelError if their heads differ."""
        its = (self.shapes[idx] for idx in self._attending)
        shapes = {(one.num_heads, one.num_kv_heads, one.head_size): one for one in its}
        if len(shapes) > 1:
            raise ModelError(
                "the layers' heads differ in number or size, and scores are kept where all are alike; use a method that"
                " reads all rows"
            )
        return next(iter(shapes.values()))

    @property
    def scale(self) -> np.float32:
        """The factor of the scores of such layers."""
        scale: np.float32 = self.tables.view(np.float32)[self._attending[0], 2 * self._code.SCALE]
        return scale

    @property
    def projected(self) -> int:
        """The most channels of queries, keys and values that a layer has, with their padding."""
        return max(of.all * of.size for of in map(self._heads, self.shapes))

    @property
    def attended(self) -> int:
        """The most channels that a layer's attention gives, with their padding."""
        return max(padded(of.out * of.size, GROUP) for of in map(self._heads, self.shapes))

    @property
    def state_room(self) -> int:
        """The most bytes that a thread needs for states and what they are made of."""
        deltas = [one.delta for one in self.shapes if one.delta is not None]
        room_for = machine_code("gated_delta").room_for_states if deltas else None
        return max((room_for(one.key_size, one.value_size) for one in deltas if room_for), default=0)

    @property
    def most_together(self) -> int:
        """The most queries whose scores a layer keeps at once."""
        return max(int(self._code.TOGETHER), *(one.num_heads // one.num_kv_heads for one in self.shapes))

    def _heads(self, shape: LayerShape) -> _Heads:
        """Return the heads that a layer has room for, with their padding; other layers have panels instead."""
        if shape.mixer == "short_conv":
            num_panels = padded(self._width, PANEL) // PANEL
            return _Heads(query=num_panels, key=num_panels, size=PANEL, out=num_panels)
        if (delta := shape.delta) is not None:
            values, of_heads = delta.num_values * delta.value_size // PANEL, padded(delta.num_values, PANEL) // PANEL
            keys = delta.num_keys * delta.key_size // PANEL
            inputs, spare = delta.num_inputs // PANEL, keys + values + of_heads
            return _Heads(query=inputs, key=of_heads, size=PANEL, out=values, more=values, spare=spare)
        num_heads = shape.num_heads
        more = num_heads if shape.has_gates else 0
        return _Heads(query=num_heads, key=shape.num_kv_heads, size=padded_head(shape), out=num_heads, more=more)

    def rows_together(self, shape: LayerShape) -> int:
        """Return how many rows of a text a layer attends with at once."""
        return max(1, int(self._code.TOGETHER) * shape.num_kv_heads // shape.num_heads)

    def turn(self, positions: IntArray | None = None, axes: IntArray | None = None) -> None:
        """Let the layers turn heads by the angles of positions [3, T] whose channels have these axes.

        Args:
            positions: None: by those of all positions, one after the other.
        """
        tables: Mapping[Rotation, tuple[Floats, Floats]] = self._rotations
        if positions is not None:
            assert axes is not None
            tables = {kind: angles_of_axes(two, positions, axes) for kind, two in self._rotations.items()}
        elif self._turned_by is tables:
            return
        self._turned_by = tables
        for table, kind in zip(self.tables, self._kinds, strict=True):
            if kind is not None:
                table[self._code.COS], table[self._code.SIN] = (one.ctypes.data for one in tables[kind])

    def _table(self, idx: int, layer: DecoderLayer) -> list[int]:
        """Pack a layer and return its table."""
        code, shape = self._code, layer.shape
        its = linears_of(layer, self._architecture, self._config)
        linears = self._linears(its, shape, self._order(idx))
        table = [0] * code.LAYER_SIZE
        for place, linear in linears.items():
            table[place : place + code.LINEAR_SIZE] = linear.entry
        arrays = {**self._norms(layer), **self._filter(layer), **self._of_delta(layer), **self._growth(idx)}
        if (sinks := self._vectors(layer).get("sinks")) is not None:
            arrays[code.SINKS] = sinks.astype(np.float32)
        for place, array in arrays.items():
            table[place] = array.ctypes.data
        self.mlp_widths.append(0 if its.mlp is None else linears[code.GATE].scales.shape[0])
        kind, heads = self._kinds[idx], self._heads(shape)
        numbers = {
            code.WINDOW: self._windows[idx] or 0,
            code.TURNED: 0 if kind is None else self._rotations[kind][0].shape[1],
            code.HEADS: heads.query,
            code.KV_HEADS: heads.key,
            code.MORE_HEADS: heads.more,
            code.SPARE_HEADS: heads.spare,
            code.OUT_HEADS: heads.out,
            code.TURNS_FIRST: self._architecture.turns_first,
            code.HEAD: shape.head_size,
            code.PADDED_HEAD: heads.size,
            code.MLP: self.mlp_widths[-1],
            **self._place(idx),
            code.MADE_KV_HEADS: heads.key if shape.kv_source is None else 0,
            code.EXPERTS: self._experts(its, layer),
            **self._last(idx, layer),
        }
        for place, number in numbers.items():
            table[place] = number
        self._held += [linears, arrays]
        return table

    def _place(self, idx: int) -> dict[int, int]:
        """Return where a layer's part of a row lies in the cache, or of a record."""
        code = self._code
        if idx in self._summing:
            shape, before = self.shapes[idx], self._summing[: self._summing.index(idx)]
            record_at = 4 * sum(self._record_size(one) for one in before)
            numbers = {code.NUM_TAPS: shape.num_taps, code.RECORD_AT: record_at}
            if (delta := shape.delta) is not None:
                numbers |= {
                    code.KEY_HEADS: delta.num_keys,
                    code.VALUE_HEADS: delta.num_values,
                    code.KEY_SIZE: delta.key_size,
                    code.VALUE_SIZE: delta.value_size,
                    code.IS_TILED: delta.is_tiled,
                    code.STATES_CODE: machine_code("gated_delta").advance_states.address,
                    code.STATE_AT: 4 * self._states_before(idx),
                }
            return numbers
        source = self.shapes[idx].kv_source
        number = self._keeping.index(idx if source is None else source)
        return {code.KV_AT: self.layout.places[number] * self.layout.dtype.itemsize, code.KV_LAYER: number}

    def _growth(self, idx: int) -> dict[int, Floats]:
        """Return what a layer's queries are times at each position, by its place, if they grow."""
        name, kind = self._architecture.query_growth, self._kinds[idx]
        if name is None or kind is None:
            return {}
        rope = rotary_parameters(self._config)[kind[0]]
        return {self._code.QUERY_GROWTH: query_growth(rope, float(rope[name]), self._num_positions)}

    def _filter(self, layer: DecoderLayer) -> dict[int, Floats]:
        """Return the weights of a layer's convolution [taps, channels] by their place, if it has one."""
        if not layer.filters:
            return {}
        (stored,) = layer.filters.values()
        taps = stored.reshape(len(stored), -1).T.astype(np.float32)
        return {self._code.FILTER: np.stack([extended(tap, padded(len(stored), PANEL)) for tap in taps])}

    def _of_delta(self, layer: DecoderLayer) -> dict[int, Floats]:
        """Return the rates of the heads of the delta rule and what is added to its scores, by their places."""
        code, vectors = self._code, self._vectors(layer)
        if layer.shape.delta is None:
            return {}
        size = padded(layer.shape.delta.num_values, PANEL)
        return {
            code.RATES: extended(rates_of(vectors["rates"]), size),
            code.STEP_BIASES: extended(vectors["step_biases"].astype(np.float32), size),
        }

    def _order(self, idx: int) -> list[int] | None:
        """Return which channel of a head of queries or keys comes where; None for as they are."""
        kind = self._kinds[idx]
        if kind is None or not self._architecture.turns_neighbours:
            return None
        return neighbours_first(rotary_size(self._config, *kind), kind[1])

    def _linears(self, its: Linears, shape: LayerShape, order: list[int] | None) -> dict[int, PackedLinear]:
        """Return the packed linear layers by their places, but for those of experts."""
        code, pack = self._code, self._pack
        if shape.mixer == "short_conv":
            assert its.key is not None
            assert its.value is not None
            found = {code.QUERY: packed(pack, its.query), code.KEY: packed(pack, its.key)}
            found[code.VALUE] = packed(pack, its.value)
            found[code.ATTENTION_OUT] = packed(pack, its.out, factor=self._residual_scale, out_multiple=GROUP)
        elif shape.mixer == "delta_rule":
            assert its.gates is not None and its.key is not None and its.value is not None
            found = {code.QUERY: packed(pack, its.query), code.MORE: packed(pack, its.gates)}
            found |= {code.KEY: packed_scores(its.key), code.VALUE: packed_scores(its.value)}
            found[code.ATTENTION_OUT] = packed(pack, its.out, factor=self._residual_scale, out_multiple=GROUP)
        else:
            heads = self._heads(shape)
            found = {
                code.QUERY: packed_heads(pack, its.query, order, heads.query, heads.size),
                code.ATTENTION_OUT: self._attention_out(its.out, shape),
            }
            for place, linear, its_order in ((code.KEY, its.key, order), (code.VALUE, its.value, None)):
                if linear is not None:
                    found[place] = packed_heads(pack, linear, its_order, heads.key, heads.size)
            if its.value is None and its.key is not None:
                found[code.VALUE] = found[code.KEY]
            if its.gates is not None:
                found[code.MORE] = packed_heads(pack, its.gates, None, heads.more, heads.size)
        if its.mlp is not None:
            found |= {
                code.GATE: packed(pack, its.mlp.gate, out_multiple=GROUP),
                code.UP: packed(pack, its.mlp.up, out_multiple=GROUP),
                code.DOWN: packed(pack, its.mlp.down, factor=self._residual_scale, out_multiple=GROUP),
            }
        return found

    def _experts(self, its: Linears, layer: DecoderLayer) -> int:
        """Pack the experts of a layer and return the address of their table; 0 if it has none."""
        shape = layer.shape
        if its.experts is None or shape.experts is None:
            return 0
        biases = self._vectors(layer).get("expert_biases")
        made = expert_table(self._pack, its.experts, shape.experts, self._residual_scale, biases)
        if its.mlp is not None:
            self._held.append(stand_beside(made.entries, self._architecture, layer, self._width))
        self.expert_rooms.append(made.room)
        self._held.append(made)
        return int(made.entries.ctypes.data)

    def _last(self, idx: int, layer: DecoderLayer) -> dict[int, int]:
        """Return what a layer's table says of its end: the numbers of tokens, and a factor of what there is then."""
        part = self._architecture.vectors.get("layer")
        factor = np.ones(1, np.float32) if part is None else layer.vectors[part.name].astype(np.float32)
        own = own_input_table(self._architecture, idx, layer, self._pack, factor, self._width)
        self._held += [factor, own]
        if own is not None:
            return {self._code.OWN_INPUT: own.entries.ctypes.data}
        return {self._code.FACTOR: factor_at(factor)}

    def _attention_out(self, linear: Linear, shape: LayerShape) -> PackedLinear:
        """Return the layer whose inputs are heads, each followed by zeros up to its padded size."""
        if not isinstance(linear.weight, BlockWeight):
            linear = Linear(with_padded_heads(linear.weight, shape.num_heads, 1, padded_head(shape)), linear.bias)
        return packed(self._pack, linear, factor=self._residual_scale, out_multiple=GROUP)

    def _vectors(self, layer: DecoderLayer) -> dict[VectorPlace, Array]:
        return {place: layer.vectors[part.name] for place, part in self._architecture.vectors_of(layer.shape).items()}

    def _norms(self, layer: DecoderLayer) -> dict[int, Floats]:
        """Return the weights of a layer's norms by their places in its table."""
        code, architecture, shape = self._code, self._architecture, layer.shape
        width, size = padded(int(self._config.hidden_size), GROUP), padded_head(shape)
        places: dict[NormPlace, tuple[int, int]] = {
            "attention_in": (code.INPUT_NORM, 1),
            "attention_out": (code.ATTENTION_OUT_NORM, 1),
            "mlp_in": (code.MLP_NORM, 1),
            "mlp_out": (code.MLP_OUT_NORM, 1),
            "query": (code.QUERY_NORM, shape.num_heads if architecture.has_wide_norms else 1),
            "key": (code.KEY_NORM, shape.num_kv_heads if architecture.has_wide_norms else 1),
            "delta_out": (code.OUT_NORM, 1),
        }
        norms = {}
        for name, part in architecture.norms.items():
            if name not in places or part.name not in layer.norms:  # those of other tables and other layers
                continue
            place, num_heads = places[name]
            weight = norm_weight(layer.norms[part.name], 0.0 if name == "delta_out" else architecture.norm_offset)
            if name in ("query", "key"):
                norms[place] = with_padded_heads(weight, num_heads, 0, size)
            else:
                norms[place] = extended(weight, max(width, len(weight)))
        if architecture.norms_values:
            norms[code.VALUE_NORM] = extended(np.ones(shape.head_size, np.float32), size)
        return norms


def padded_head(shape: LayerShape) -> int:
    """Return the channels of a head with the zeros behind them."""
    return padded(shape.head_size, LANES)
