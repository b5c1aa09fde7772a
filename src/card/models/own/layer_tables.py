"""Tables of a decoder's layers: packed weights, norms, angles and shapes, as the machine code reads them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from card.errors import ModelError
from card.kernels.jit.tables import TOGETHER, LayerTable
from card.kernels.machine_code import machine_code
from card.kernels.number_types import Array, Dtype, Floats
from card.kernels.packed_linear import GROUP, LANES, PANEL, PackedLinear, extended, padded
from card.kernels.rotation import query_growth
from card.models.architectures.architecture import neighbours_first, rotary_parameters, rotary_size
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
from card.models.own.layer_input_tables import factor_at, layer_input_table
from card.models.own.layers import BlockWeight, Linear
from card.models.parts import NormPlace, VectorPlace
from card.models.rows.kv_layout import KVLayout, KVShape


class _Heads(NamedTuple):
    """Room of a row in a layer: numbers of heads, as `LayerTable` names them, of one padded size."""

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


# The weights of norms by their names in a layer's table.
_NORMS: Mapping[NormPlace, str] = {
    "attention_in": "input_norm",
    "attention_out": "attention_out_norm",
    "mlp_in": "mlp_norm",
    "mlp_out": "mlp_out_norm",
    "query": "query_norm",
    "key": "key_norm",
    "delta_out": "delta_norm",
}
Rotation = tuple[str, int]  # a kind of angles, and the size of the heads that turn by them


class LayerTables:
    """The layers of a decoder, packed, each with a table of its own."""

    def __init__(self, model: DecoderModel, pack: Pack, max_model_len: int, kv_dtype: Dtype) -> None:
        """Pack the layers; ``kv_dtype`` is that of keys and values in the cache."""
        self._pack = pack
        self._config, self._architecture = model.config, model.architecture  # not the model, whose weights go
        config, architecture = model.config, model.architecture
        self._residual_scale = architecture.scale("residual", config)
        self._held: list[Any] = []  # keeps alive what the tables hold addresses of
        self.shapes: list[LayerShape] = [layer.shape for layer in model.layers]
        self._width = int(config.hidden_size)
        self._attending = [idx for idx, one in enumerate(self.shapes) if one.mixer == "attention"]
        self._keeping = [idx for idx in self._attending if self.shapes[idx].kv_source is None]
        self._summing = [idx for idx, one in enumerate(self.shapes) if one.mixer != "attention"]
        shapes = [self.shapes[idx] for idx in self._keeping]
        self.layout = KVLayout(tuple(KVShape(one.num_kv_heads, padded_head(one)) for one in shapes), kv_dtype)
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
        self.tables: IntArray = np.stack(tables)
        self.turn()

    def __len__(self) -> int:
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
        attending = (self.shapes[idx] for idx in self._attending)
        shapes = {(one.num_heads, one.num_kv_heads, one.head_size): one for one in attending}
        if len(shapes) > 1:
            raise ModelError(
                "the layers' heads differ in number or size, and scores are kept where all are alike; use a method that"
                " reads all rows"
            )
        return next(iter(shapes.values()))

    @property
    def scale(self) -> np.float32:
        """The factor of the scores of such layers."""
        return np.float32(self._scale(self.shapes[self._attending[0]]))

    def _scale(self, shape: LayerShape) -> float:
        return self._architecture.scale("attention", self._config, shape.head_size**-0.5)

    @property
    def projected(self) -> int:
        """The most channels of queries, keys and values that a layer has, with their padding."""
        return max(heads.all * heads.size for heads in map(self._heads, self.shapes))

    @property
    def attended(self) -> int:
        """The most channels that a layer's attention gives, with their padding."""
        return max(padded(heads.out * heads.size, GROUP) for heads in map(self._heads, self.shapes))

    @property
    def state_room(self) -> int:
        """The most bytes that a thread needs for states and what they are made of."""
        deltas = [one.delta for one in self.shapes if one.delta is not None]
        room_for = machine_code("gated_delta").room_for_states if deltas else None
        return max((room_for(one.key_size, one.value_size) for one in deltas if room_for), default=0)

    @property
    def most_together(self) -> int:
        """The most queries whose scores a layer keeps at once, in whole vectors."""
        return padded(max(TOGETHER, *(one.num_heads // one.num_kv_heads for one in self.shapes)), LANES)

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
        return max(1, TOGETHER * shape.num_kv_heads // shape.num_heads)

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
                LayerTable.write(table, dict(zip(("cos", "sin"), tables[kind], strict=True)))

    def _table(self, idx: int, layer: DecoderLayer) -> IntArray:
        shape, kind, heads = layer.shape, self._kinds[idx], self._heads(layer.shape)
        stored = linears_of(layer, self._architecture, self._config)
        linears = self._linears(stored, shape, self._order(idx))
        self.mlp_widths.append(0 if stored.mlp is None else linears["gate"].scales.shape[0])
        entries: dict[str, Any] = {
            **linears,
            **self._norms(layer),
            **self._filter(layer),
            **self._of_delta(layer),
            **self._growth(idx),
            **self._place(idx),
            **self._last(idx, layer),
            "window": self._windows[idx] or 0,
            "turned": 0 if kind is None else self._rotations[kind][0].shape[1],
            "heads": heads.query,
            "kv_heads": heads.key,
            "more_heads": heads.more,
            "spare_heads": heads.spare,
            "out_heads": heads.out,
            "turns_first": self._architecture.turns_first,
            "head_size": shape.head_size,
            "padded_head": heads.size,
            "scale": self._scale(shape),
            "mlp_width": self.mlp_widths[-1],
            "made_kv_heads": heads.key if shape.kv_source is None else 0,
            "experts": self._experts(stored, layer),
        }
        if (sinks := self._vectors(layer).get("sinks")) is not None:
            entries["sinks"] = sinks.astype(np.float32)
        self._held.append(entries)
        return LayerTable.pack(entries)

    def _place(self, idx: int) -> dict[str, int]:
        """Return where a layer's part of a row lies in the cache, or of a record."""
        if idx in self._summing:
            shape, before = self.shapes[idx], self._summing[: self._summing.index(idx)]
            record_at = 4 * sum(self._record_size(one) for one in before)
            numbers = {"num_taps": shape.num_taps, "record_at": record_at}
            if (delta := shape.delta) is not None:
                numbers |= {
                    "key_heads": delta.num_keys,
                    "value_heads": delta.num_values,
                    "key_size": delta.key_size,
                    "value_size": delta.value_size,
                    "is_tiled": delta.is_tiled,
                    "states_code": machine_code("gated_delta").advance_states.address,
                    "state_at": 4 * self._states_before(idx),
                }
            return numbers
        source = self.shapes[idx].kv_source
        number = self._keeping.index(idx if source is None else source)
        return {"kv_at": self.layout.places[number] * self.layout.dtype.itemsize, "kv_layer": number}

    def _growth(self, idx: int) -> dict[str, Floats]:
        """Return what a layer's queries are times at each position, if they grow."""
        name, kind = self._architecture.query_growth, self._kinds[idx]
        if name is None or kind is None:
            return {}
        rope = rotary_parameters(self._config)[kind[0]]
        return {"query_growth": query_growth(rope, float(rope[name]), self._num_positions)}

    def _filter(self, layer: DecoderLayer) -> dict[str, Floats]:
        """Return the weights of a layer's convolution [taps, channels], if it has one."""
        if not layer.filters:
            return {}
        (stored,) = layer.filters.values()
        taps = stored.reshape(len(stored), -1).T.astype(np.float32)
        return {"filter": np.stack([extended(tap, padded(len(stored), PANEL)) for tap in taps])}

    def _of_delta(self, layer: DecoderLayer) -> dict[str, Floats]:
        """Return the rates of the heads of the delta rule and what is added to its scores."""
        vectors = self._vectors(layer)
        if layer.shape.delta is None:
            return {}
        size = padded(layer.shape.delta.num_values, PANEL)
        return {
            "rates": extended(rates_of(vectors["rates"]), size),
            "step_biases": extended(vectors["step_biases"].astype(np.float32), size),
        }

    def _order(self, idx: int) -> list[int] | None:
        """Return which channel of a head of queries or keys comes where; None for as they are."""
        kind = self._kinds[idx]
        if kind is None or not self._architecture.turns_neighbours:
            return None
        return neighbours_first(rotary_size(self._config, *kind), kind[1])

    def _linears(self, stored: Linears, shape: LayerShape, order: list[int] | None) -> dict[str, PackedLinear]:
        """Return the packed linear layers by their names in the table, but for those of experts."""
        pack = self._pack
        if shape.mixer == "attention":
            linears = self._of_attention(stored, shape, order)
        else:
            assert stored.key is not None and stored.value is not None
            of_states = packed_scores if shape.mixer == "delta_rule" else functools.partial(packed, pack)
            linears = {"query": packed(pack, stored.query), "key": of_states(stored.key)}
            linears["value"] = of_states(stored.value)
            if stored.gates is not None:
                linears["more"] = packed(pack, stored.gates)
            linears["attention_out"] = packed(pack, stored.out, factor=self._residual_scale, out_multiple=GROUP)
        if stored.mlp is not None:
            linears["gate"] = packed(pack, stored.mlp.gate, out_multiple=GROUP)
            linears["up"] = packed(pack, stored.mlp.up, out_multiple=GROUP)
            linears["down"] = packed(pack, stored.mlp.down, factor=self._residual_scale, out_multiple=GROUP)
        return linears

    def _of_attention(self, stored: Linears, shape: LayerShape, order: list[int] | None) -> dict[str, PackedLinear]:
        heads = self._heads(shape)
        parts = {
            "query": (stored.query, order, heads.query),
            "key": (stored.key, order, heads.key),
            "value": (stored.value, None, heads.key),
            "more": (stored.gates, None, heads.more),
        }
        linears = {
            name: packed_heads(self._pack, linear, its_order, num_heads, heads.size)
            for name, (linear, its_order, num_heads) in parts.items()
            if linear is not None
        }
        if stored.value is None and stored.key is not None:
            linears["value"] = linears["key"]
        return {**linears, "attention_out": self._attention_out(stored.out, shape)}

    def _experts(self, stored: Linears, layer: DecoderLayer) -> IntArray | int:
        """Pack the experts of a layer and return their table; 0 if it has none."""
        shape = layer.shape
        if stored.experts is None or shape.experts is None:
            return 0
        biases = self._vectors(layer).get("expert_biases")
        made = expert_table(self._pack, stored.experts, shape.experts, self._residual_scale, biases)
        if stored.mlp is not None:
            self._held.append(stand_beside(made.entries, self._architecture, layer, self._width))
        self.expert_rooms.append(made.room)
        self._held.append(made)
        return made.entries

    def _last(self, idx: int, layer: DecoderLayer) -> dict[str, Any]:
        """Return what a layer's table says of its end: the numbers of tokens, and a factor of what there is then."""
        part = self._architecture.vectors.get("layer")
        factor = np.ones(1, np.float32) if part is None else layer.vectors[part.name].astype(np.float32)
        made = layer_input_table(self._architecture, idx, layer, self._pack, factor, self._width)
        self._held += [factor, made]
        return {"factor": factor_at(factor)} if made is None else {"layer_input": made[0]}

    def _attention_out(self, linear: Linear, shape: LayerShape) -> PackedLinear:
        """Return the layer whose inputs are heads, each followed by zeros up to its padded size."""
        if not isinstance(linear.weight, BlockWeight):
            linear = Linear(with_padded_heads(linear.weight, shape.num_heads, 1, padded_head(shape)), linear.bias)
        return packed(self._pack, linear, factor=self._residual_scale, out_multiple=GROUP)

    def _vectors(self, layer: DecoderLayer) -> dict[VectorPlace, Array]:
        return {place: layer.vectors[part.name] for place, part in self._architecture.vectors_of(layer.shape).items()}

    def _norms(self, layer: DecoderLayer) -> dict[str, Floats]:
        """Return the weights of a layer's norms by their names in its table."""
        architecture, shape = self._architecture, layer.shape
        width, size = padded(int(self._config.hidden_size), GROUP), padded_head(shape)
        heads_of = {"query": shape.num_heads, "key": shape.num_kv_heads} if architecture.has_wide_norms else {}
        norms = {}
        for name, part in architecture.norms.items():
            if name not in _NORMS or part.name not in layer.norms:  # those of other tables and other layers
                continue
            place = _NORMS[name]
            weight = norm_weight(layer.norms[part.name], 0.0 if name == "delta_out" else architecture.norm_offset)
            if name in ("query", "key"):
                norms[place] = with_padded_heads(weight, heads_of.get(name, 1), 0, size)
            else:
                norms[place] = extended(weight, max(width, len(weight)))
        if architecture.norms_values:
            norms["value_norm"] = extended(np.ones(shape.head_size, np.float32), size)
        return norms


def padded_head(shape: LayerShape) -> int:
    """Return the channels of a head with the zeros behind them."""
    return padded(shape.head_size, LANES)
