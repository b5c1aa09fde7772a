"""Blocks of 32 numbers with one scale, and a smallest number in some of them."""

from __future__ import annotations

from functools import partial

import numpy as np

from card.kernels.formats.block_format import IQ4_TABLE, BlockFormat, Blocks, BlockShape, Bytes, low_planes, nibbles


def _split_32(raw: Bytes, *, has_minimum: bool = False, has_fifth_bits: bool = False) -> Blocks:
    """Split blocks of 32 numbers of four or five bits."""
    first = 4 if has_minimum else 2
    scales, minima = raw[..., :2], raw[..., 2:4] if has_minimum else None
    lower, fifth = raw[..., first + (4 if has_fifth_bits else 0) :], raw[..., first : first + 4]
    if raw.shape[1] % 2 == 0:
        planes = _planes(lower, fifth if has_fifth_bits else None)
        return Blocks(planes, scales, minima, are_planes=True)
    numbers = nibbles(lower)
    if has_fifth_bits:
        numbers |= np.unpackbits(fifth, axis=-1, bitorder="little") << 4
    return Blocks(numbers, scales, minima)


def _planes(lower: Bytes, fifth: Bytes | None) -> Bytes:
    """Return the planes of pairs of blocks, of lower bits [R, N, 16] and fifth bits [R, N, 4]: [R, N / 2, 8 * bits]."""
    pairs = np.ascontiguousarray(lower).view(np.uint64).reshape(len(lower), -1, 2, 2)
    planes = np.empty((*pairs.shape[:2], 4 if fifth is None else 5), np.uint64)
    low_planes(pairs[..., 0, :], pairs[..., 1, :], planes[..., :4].reshape(pairs.shape))
    if fifth is not None:
        planes[..., 4] = _turned(np.ascontiguousarray(fifth).reshape(*pairs.shape[:2], 8).view(np.uint64)[..., 0])
    return planes.view(np.uint8)


def _turned(words: Bytes) -> Bytes:
    """Return words of eight bytes with rows and columns of their bits changed: bit i of byte j is bit j of byte i."""
    for distance, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        moved = (words ^ words >> np.uint64(distance)) & np.uint64(mask)
        words = words ^ moved ^ moved << np.uint64(distance)
    return words


_q4_1 = partial(_split_32, has_minimum=True)
_q5_0 = partial(_split_32, has_fifth_bits=True)
_q5_1 = partial(_split_32, has_minimum=True, has_fifth_bits=True)


def _split_mxfp4(raw: Bytes) -> Blocks:
    return Blocks(nibbles(raw[..., 1:]), raw[..., :1])


def _split_q8_0(raw: Bytes) -> Blocks:
    return Blocks(raw[..., 2:], raw[..., :2])


def _shape(bits: int, zero: int) -> BlockShape:
    """Return the shape of blocks whose numbers stand around a zero; those that have none have a smallest number."""
    return BlockShape(part=32, bits=bits, zero=zero, scale="half", has_minimum=not zero)


# Twice the numbers of four bits, one of them the sign, two the exponent: 0, 0.5, 1, 1.5, 2, 3, 4 and 6; around 12.
_MXFP4_TABLE = tuple(12 + sign * one for sign in (1, -1) for one in (0, 1, 2, 3, 4, 6, 8, 12))
_IQ4_NL = BlockShape(part=32, bits=4, zero=128, scale="half", table=IQ4_TABLE)
_MXFP4 = BlockShape(part=32, bits=4, zero=12, scale="exponent", table=_MXFP4_TABLE)
FORMATS = (
    BlockFormat(2, "Q4_0", 32, 18, slice(0, 2), _shape(4, zero=8), _split_32),
    BlockFormat(3, "Q4_1", 32, 20, slice(0, 4), _shape(4, zero=0), _q4_1),
    BlockFormat(6, "Q5_0", 32, 22, slice(0, 2), _shape(5, zero=16), _q5_0),
    BlockFormat(7, "Q5_1", 32, 24, slice(0, 4), _shape(5, zero=0), _q5_1),
    BlockFormat(8, "Q8_0", 32, 34, slice(0, 2), _shape(8, zero=128), _split_q8_0),
    BlockFormat(20, "IQ4_NL", 32, 18, slice(0, 2), _IQ4_NL, _split_32),
    BlockFormat(39, "MXFP4", 32, 17, slice(0, 1), _MXFP4, _split_mxfp4),
)
