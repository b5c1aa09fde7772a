"""Weights of a GGUF file: where they stand, in which order, and their values.

They are dequantised some rows at a time, so that no more than the result is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, BinaryIO

import numpy as np

from card.kernels.formats import BLOCK_FORMATS
from card.kernels.number_types import BFLOAT16, FLOAT16, FLOAT32, Array, Dtype, has_nan
from card.models.files.gguf.header import DamagedError, GgufError, Header, TensorPlace
from card.models.files.gguf.other_types import block_sizes, type_name, unpacked
from card.models.rows.row_tree import IntArray

PLAIN_DTYPES = {0: FLOAT32, 1: FLOAT16, 30: BFLOAT16}  # of ggml's types
_DIGITS = Context(prec=30)
_BLOCK_ELEMENTS = 1 << 20  # dequantised at once


@dataclass(frozen=True, slots=True, eq=False)
class Untiled:
    """An order of heads that suits numbers alone: blocks cannot be cut, and stay as they are."""

    axis: int
    order: IntArray


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the file that becomes one of the model."""

    name: str  # transformers'
    place: TensorPlace
    order: IntArray | None  # of its rows in the file; None: as they are
    offset: float = 0.0  # that files add to it
    stays_float: bool = False  # it is never multiplied in blocks
    is_vector: bool = False  # and kept in 32 bits
    is_rates: bool = False  # files hold -e^x of each number x
    untiled: Untiled | None = None  # how the model has it, where the file has heads in another order


def check_tensors(header: Header) -> None:
    """Check that each tensor lies inside the file, in a place of its own, and can be dequantised."""
    last, last_end = "", 0
    for place in sorted(header.tensors.values(), key=lambda one: one.offset):
        block, block_bytes = _block_of(place)
        if place.shape[-1] % block:
            raise DamagedError(f"damaged: rows of {place.shape[-1]} in {place.name} are no multiple of {block}")
        end = place.offset + math.prod(place.shape) // block * block_bytes
        if end > header.num_bytes:
            raise DamagedError(f"cut off: {place.name} ends at byte {end}, the file at {header.num_bytes}")
        if place.offset < last_end:  # a small file could stand for a model of any size
            raise DamagedError(f"damaged: its tensors {last} and {place.name} overlap")
        last, last_end = place.name, end


def _block_of(place: TensorPlace) -> tuple[int, int]:
    """Return the elements and the bytes of a block of a tensor. Raises: GgufError if its type cannot be read."""
    form = BLOCK_FORMATS.get(place.type_id)
    if form is not None:
        return form.inputs, form.num_bytes
    if (plain := PLAIN_DTYPES.get(place.type_id)) is not None:
        return 1, plain.itemsize
    if (sizes := block_sizes(place.type_id)) is None:
        raise GgufError(
            f"has weights quantised as {type_name(place.type_id)} ({place.name}), which cannot be read; use another one"
        )
    return sizes


def _unpacked(raw: np.ndarray[Any, np.dtype[np.uint8]], place: TensorPlace) -> Array:
    """Return the numbers that rows of a tensor [n, bytes] stand for, float32. Raises: GgufError if one is NaN."""
    form = BLOCK_FORMATS.get(place.type_id)
    if form is None:
        plain = PLAIN_DTYPES.get(place.type_id)
        numbers = unpacked(raw, place.type_id) if plain is None else raw.view(plain)
        if has_nan(numbers):
            raise GgufError(f"cannot be read: {place.name} holds NaN, which is no number; download the file again")
        return numbers.astype(np.float32, copy=False)
    try:
        form.check(raw)
    except ValueError as error:
        raise GgufError(f"cannot be read: {place.name}: {error}") from None
    return form.numbers(raw)


def are_equal(one: Weight, other: Weight) -> bool:
    """Return whether two weights of one shape are equal; it ends at the first rows that differ."""
    both = (read_rows(weight, FLOAT32) for weight in (one, other))
    return all(np.array_equal(a, b) for a, b in zip(*both, strict=True))


def read_raw(weight: Weight, first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return ``count`` rows of a weight as the file has them, [count, bytes], in the model's order.

    Raises: GgufError if the file has become shorter.
    """
    place, row_bytes = weight.place, row_bytes_of(weight.place)
    with place.file.open("rb") as stream:
        if weight.order is None:
            stream.seek(place.offset + first * row_bytes)
            return _raw(stream, count, row_bytes)
        stream.seek(place.offset)  # each row may be anywhere: such weights are small
        raw = _raw(stream, place.num_rows, row_bytes)
    chosen: np.ndarray[Any, np.dtype[np.uint8]] = raw[weight.order[first : first + count]]
    return chosen


def read_rows(weight: Weight, dtype: Dtype) -> Iterator[Array]:
    """Yield a weight, some rows at a time. Raises: GgufError if the file has become shorter."""
    place = weight.place
    num_rows, row_bytes = place.num_rows, row_bytes_of(place)
    with place.file.open("rb") as stream:
        stream.seek(place.offset)
        if len(place.shape) == 1:
            values = _unpacked(_raw(stream, 1, row_bytes), place)[0] - np.float32(weight.offset)
            if weight.is_rates:
                values = _logarithms(values, place)
            yield (values if weight.order is None else values[weight.order]).astype(dtype, copy=False)
            return
        # In another order each row needs some rows of the file: such weights are small enough to be read at once.
        ordered = None if weight.order is None else read_raw(weight, 0, num_rows)
        step = max(1, _BLOCK_ELEMENTS // place.shape[-1])
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            part = _raw(stream, count, row_bytes) if ordered is None else ordered[first : first + count]
            yield _unpacked(part, place).astype(dtype, copy=False)


def read_untiled(weight: Weight, dtype: Dtype) -> Iterator[Array]:
    """Yield a weight with its heads in the model's order, see `read_rows`."""
    if weight.untiled is None:
        yield from read_rows(weight, dtype)
    else:
        whole = np.concatenate(list(read_rows(weight, dtype)))
        yield whole.take(weight.untiled.order, weight.untiled.axis)


def _logarithms(rates: Array, place: TensorPlace) -> Array:
    """Return log(-x) of numbers below 0, to the nearest float. Raises: DamagedError if there are others."""
    if not (np.isfinite(rates) & (rates < 0)).all():
        raise DamagedError(f"damaged: {place.name} has numbers that are not below 0")
    exact = [float(Decimal(-float(one)).ln(_DIGITS)) for one in rates]
    return np.array(exact, np.float32)


def row_bytes_of(place: TensorPlace) -> int:
    """Return the bytes of a row of a tensor."""
    block, block_bytes = _block_of(place)
    return int(place.shape[-1] // block * block_bytes)


def _raw(stream: BinaryIO, num_rows: int, row_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    raw = np.fromfile(stream, np.uint8, num_rows * row_bytes)
    if len(raw) < num_rows * row_bytes:
        raise DamagedError("cut off: it became shorter while it was read")
    return raw.reshape(num_rows, row_bytes)
