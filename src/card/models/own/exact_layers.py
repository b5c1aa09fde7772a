"""Layers of exact passes: weights packed as the machine code reads them, and tables of the angles of heads."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from decimal import Context, Decimal
from pathlib import Path

import numpy as np

from card.errors import ModelError
from card.kernels.float_linear import FLOAT_PRODUCTS, float_linear
from card.kernels.int8_linear import quantize_linear
from card.kernels.number_types import FLOAT32, Array, Floats, has_nan
from card.kernels.packed_linear import PANEL, PackedLinear
from card.kernels.rotation import attention_factor, inverse_frequencies, rotation_tables
from card.machine.folders import read_kept, write_kept
from card.models.architectures.architecture import rotary_parameters, rotary_size
from card.models.files.kept_weights import state_of
from card.models.names import model_name
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.own.layers import BlockWeight, Linear, Weight
from card.models.rows.row_tree import IntArray

_DIGITS = Context(prec=30)
Pack = Callable[[Array, Array | None, float, int], PackedLinear]  # weight, bias, factor, out_multiple


def with_padded_heads(weight: Array, num_heads: int, axis: int, size: int) -> Array:
    """Return a weight whose dimension ``axis`` is heads, each followed by zeros up to ``size``."""
    head_size = weight.shape[axis] // num_heads
    if head_size == size:
        return weight
    shape = list(weight.shape)
    split = weight.reshape(*shape[:axis], num_heads, head_size, *shape[axis + 1 :])
    shape[axis] = num_heads * size
    padded = np.zeros((*shape[:axis], num_heads, size, *shape[axis + 1 :]), weight.dtype)
    padded[(slice(None),) * (axis + 1) + (slice(head_size),)] = split
    return padded.reshape(shape)


def in_integers(weight: Array, bias: Array | None, factor: float, out_multiple: int) -> PackedLinear:
    """Return a layer of 8-bit integers whose results are times a factor, which goes into their scales."""
    if factor != 1.0:
        weight = weight.astype(np.float32) * np.float32(factor)
        bias = None if bias is None else bias.astype(np.float32) * np.float32(factor)
    return quantize_linear(weight, bias, out_multiple=out_multiple)


def as_stored(weight: Array, bias: Array | None, factor: float, out_multiple: int) -> PackedLinear:
    """Return a layer with these weights whose results are times a factor."""
    bias = None if bias is None else bias.astype(np.float32) * np.float32(factor)
    return float_linear(weight, bias, factor=factor, out_multiple=out_multiple)


def check_numbers(model: DecoderModel, weights: Iterable[tuple[str, Weight]]) -> None:
    """Check some weights of a model by name; blocks have been checked. Raises: ModelError that names one with a NaN."""
    for name, weight in weights:
        if not isinstance(weight, BlockWeight) and has_nan(weight):
            raise ModelError(nan_in(model_name(model), name))


def nan_in(model: str, weight: str) -> str:
    """Return what is said of a model with a weight that is no number."""
    return f"{model}: its weight {weight} holds NaN, which is no number; download the model again"


def check_tables(model: DecoderModel, files: Sequence[Path], cache: Path | None) -> None:
    """Check what passes read row by row, once for each state of the files if that can be kept; errors as above."""
    if not all(isinstance(table, BlockWeight) for _, table in model.tables):
        check_once("", files, cache, lambda: check_numbers(model, model.tables))


def check_once(kind: str, files: Sequence[Path], cache: Path | None, check: Callable[[], None]) -> None:
    """Do a check of a kind, unless files in this state have passed it and there is a cache that says so."""
    mark = None
    if cache is not None:
        mark = cache / "checked" / (hashlib.sha256(state_of(files).encode()).hexdigest()[:32] + kind)
    with contextlib.suppress(OSError):
        if mark is not None and read_kept(mark) == b"":
            return
    check()
    with contextlib.suppress(OSError):
        if mark is not None:
            write_kept(mark, b"")


def products_of(model: DecoderModel) -> list[str]:
    """Return the formats of a model's linear layers, each once."""
    numbers = "byte" if is_int8(model) and not model.has_blocks else None
    formats: dict[str, None] = {}
    for linear in model.linears:
        weight = linear.weight
        product = weight.form.product if isinstance(weight, BlockWeight) else numbers or FLOAT_PRODUCTS[weight.dtype]
        formats[product] = None
    if any(layer.shape.experts is not None or layer.shape.delta is not None for layer in model.layers):
        formats[FLOAT_PRODUCTS[FLOAT32]] = None  # of routers, and of scores of the delta rule
    return list(formats)


def packed(pack: Pack, linear: Linear, *, factor: float = 1.0, out_multiple: int = PANEL) -> PackedLinear:
    """Return a layer whose results are times a factor."""
    if isinstance(linear.weight, BlockWeight):
        return linear.blocks_packed(factor=factor, out_multiple=out_multiple)
    return pack(linear.weight, linear.bias, factor, out_multiple)


def packed_scores(linear: Linear) -> PackedLinear:
    """Return a layer that stays in floats, or in blocks: a few numbers of it say what becomes of a whole text."""
    if isinstance(linear.weight, BlockWeight):
        return linear.blocks_packed()
    return float_linear(np.asarray(linear.weight, np.float32), None)


def rates_of(logarithms: Array) -> Floats:
    """Return -e^x of each number, the nearest float: the same on all computers."""
    exact = [-Decimal(float(one)).exp(_DIGITS) for one in logarithms]
    return np.array([float(one) for one in exact], np.float32)


def packed_heads(pack: Pack, linear: Linear, order: list[int] | None, num_heads: int, size: int) -> PackedLinear:
    """Return a layer whose outputs are heads, each followed by zeros up to ``size``.

    Args:
        order: which channel of a head comes where; None for as they are.
    """
    if order is not None:
        linear = linear.select(np.arange(linear.out_features).reshape(num_heads, -1)[:, order].ravel())
    if isinstance(linear.weight, BlockWeight):  # whose heads need no zeros
        return linear.blocks_packed()
    weight = with_padded_heads(linear.weight, num_heads, 0, size)
    bias = None if linear.bias is None else with_padded_heads(linear.bias, num_heads, 0, size)
    return pack(weight, bias, 1.0, PANEL)


def turning_tables(
    model: DecoderModel, num_positions: int, kind: str, head_size: int, switch_len: int | None = None
) -> tuple[Floats, Floats]:
    """Return cos and sin [num_positions, channels that turn], for halves of a head.

    They have the same bits on every computer if the type of the angles is known.

    Args:
        switch_len: positions of short texts, whose rows come first; None: all texts are short.
    """
    tables = _tables(model, num_positions, kind, head_size, is_long=switch_len is not None)
    if switch_len is None:
        return tables
    short = _tables(model, switch_len, kind, head_size, is_long=False)
    cos, sin = (np.concatenate(pair) for pair in zip(short, tables, strict=True))
    return cos, sin


def _tables(
    model: DecoderModel, num_positions: int, kind: str, head_size: int, *, is_long: bool
) -> tuple[Floats, Floats]:
    config = model.config
    rope, longest = rotary_parameters(config)[kind], config.max_position_embeddings
    frequencies = inverse_frequencies(rope, rotary_size(config, kind, head_size), longest, is_long=is_long)
    if frequencies is None:
        assert model.angles is not None, "of a model whose angles transformers computes"
        return model.angles(num_positions, kind)
    tables = rotation_tables(frequencies, num_positions, attention_factor(rope, longest))
    cos, sin = (np.tile(table, (1, 2)) for table in tables)
    return cos, sin


def angles_of_axes(tables: tuple[Floats, Floats], positions: IntArray, axes: IntArray) -> tuple[Floats, Floats]:
    """Return cos and sin [T, channels] of rows with positions [3, T], of which each channel takes that of its axis."""
    places = positions[axes].T  # [T, channels]
    cos, sin = (np.ascontiguousarray(table[places, np.arange(len(axes))]) for table in tables)
    return cos, sin


def norm_weight(stored: Array, offset: float) -> Floats:
    """Return the weight of a norm."""
    weight: Floats = stored.astype(np.float32) + np.float32(offset)
    return weight


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return rows [n, D] over the root of their mean square, times a weight [D]."""
    square = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    root: Floats = np.sqrt(square + np.float32(eps)).astype(np.float32)
    return x / root * weight


def layer_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return rows [n, D] without their mean, over their deviation, times a weight [D]."""
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    return rms_norm(centred, weight, eps)
