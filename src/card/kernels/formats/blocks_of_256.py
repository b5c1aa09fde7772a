"""K blocks: 256 numbers, whose parts have scales of six or eight bits times one of 16 bits."""

from __future__ import annotations

from functools import partial

import numpy as np

from card.kernels.formats.block_format import (
    IQ4_TABLE,
    ONES,
    BlockFormat,
    Blocks,
    BlockShape,
    Bytes,
    low_planes,
    nibbles,
    pairs_of_32,
)

_FOUR_BITS, _SIX_BITS, _UPPER_BITS = (np.uint32(0x01010101 * byte) for byte in (0x0F, 0x3F, 0x30))  # of each byte


_TWO_BITS, _TWICE_TWO_BITS = np.uint64(ONES * 3), np.uint64(ONES * 15)


def _packed_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    """Return the eight scales and eight smallest weights, six bits each, of the 12 bytes of a K block."""
    words = np.ascontiguousarray(raw).view(np.uint32)  # four bytes at once
    first, second, third = words[..., 0], words[..., 1], words[..., 2]
    upper = [(one >> 2) & _UPPER_BITS for one in (first, second)]
    scales = np.stack([first & _SIX_BITS, (third & _FOUR_BITS) | upper[0]], axis=-1)
    minima = np.stack([second & _SIX_BITS, (third >> 4 & _FOUR_BITS) | upper[1]], axis=-1)
    return scales.view(np.uint8), minima.view(np.uint8)


def _halves(raw: Bytes) -> Bytes:
    """Return scale and smallest weight of a K block, four bytes; the latter is subtracted, so its sign changes."""
    halves = raw.copy()
    halves[..., 3] ^= 0x80
    return halves


def _scale_alone(raw: Bytes) -> Bytes:
    """Return the header of a block [R, N, 4] whose parts have no smallest weight, of its scale [R, N, 2]."""
    return np.concatenate([raw, np.zeros_like(raw)], axis=-1)


def _bits_of(packed: Bytes, bits: int, first: int) -> Bytes:
    """Return some bits of numbers [R, N, inputs], from bit ``first`` on, of bytes [R, N, n].

    Each 32 bytes hold as many bits for each of the next 32 numbers, then for the 32 behind these, and so on.
    """
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(-1, 4)  # eight bytes at once
    mask, out = np.uint64(ONES * ((1 << bits) - 1) << first), np.empty((len(words), 8 // bits, 4), np.uint64)
    for i in range(8 // bits):
        left = first - bits * i
        moved = words << np.uint64(left) if left >= 0 else words >> np.uint64(-left)
        np.bitwise_and(moved, mask, out=out[:, i])
    return out.view(np.uint8).reshape(*packed.shape[:2], -1)


def _split_k(raw: Bytes, *, has_fifth_bits: bool = False) -> Blocks:
    """Split blocks of 256 numbers of four or five bits."""
    factors = *_packed_scales(raw[..., 4:16]), _halves(raw[..., :4])
    if not has_fifth_bits:
        return Blocks(raw[..., 16:].reshape(len(raw), -1, 32), *factors, are_planes=True)
    numbers = pairs_of_32(raw[..., 48:])
    numbers |= _bits_of(raw[..., 16:48], 1, first=4)
    return Blocks(numbers, *factors)


def _split_q6_k(raw: Bytes) -> Blocks:
    """Split blocks of 256 numbers of six bits: of each half, 64 bytes hold the lower four bits, 32 the upper two."""
    planes = np.empty((*raw.shape[:2], 2, 2, 6), np.uint64)  # of two groups in each half
    lower = np.ascontiguousarray(raw[..., :128]).view(np.uint64).reshape(*raw.shape[:2], 2, 2, 4)
    low_planes(lower[..., 0, :], lower[..., 1, :], planes[..., :4])
    upper = np.ascontiguousarray(raw[..., 128:192]).view(np.uint64).reshape(*raw.shape[:2], 2, 2, 2)
    first, second = upper[..., 0, :], upper[..., 1, :]
    for group in range(2):
        pairs = [one >> np.uint64(4 * group) & _TWICE_TWO_BITS for one in (first, second)]
        low, high = (one & _TWO_BITS | (one & ~_TWO_BITS) << np.uint64(2) for one in pairs)
        planes[..., group, 4:] = low | high << np.uint64(2)
    stored = planes.view(np.uint8).reshape(len(raw), -1, 48)
    return Blocks(stored, raw[..., 192:208], None, _scale_alone(raw[..., 208:]), are_planes=True)


def _split_q3_k(raw: Bytes) -> Blocks:
    numbers = _bits_of(raw[..., 32:96], 2, first=0)
    numbers |= _bits_of(raw[..., :32], 1, first=2)
    upper = np.concatenate([raw[..., 104:108] >> (2 * i) & 3 for i in range(4)], axis=-1)
    scales = nibbles(raw[..., 96:104]) | upper << 4
    return Blocks(numbers, scales - np.uint8(32), None, _scale_alone(raw[..., 108:]))


def _split_q2_k(raw: Bytes) -> Blocks:
    numbers, factors = _bits_of(raw[..., 16:80], 2, first=0), raw[..., :16]
    return Blocks(numbers, factors & 15, factors >> 4, _halves(raw[..., 80:]))


def _split_iq4_xs(raw: Bytes) -> Blocks:
    places = np.arange(0, 16, 2, dtype=np.uint16)
    upper = np.ascontiguousarray(raw[..., 2:4]).view(np.uint16) >> places & 3
    lower = np.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], axis=-1).reshape(upper.shape)
    scales = (lower | upper.astype(np.uint8) << 4) - np.uint8(32)
    numbers = nibbles(raw[..., 8:].reshape(*raw.shape[:2], 8, 16)).reshape(*raw.shape[:2], -1)
    return Blocks(numbers, scales, None, _scale_alone(raw[..., :2]))


_split_q5_k = partial(_split_k, has_fifth_bits=True)
_Q2_K = BlockShape(part=16, bits=2, scale="byte", has_minimum=True)
_Q3_K = BlockShape(part=16, bits=3, zero=4, scale="signed byte")
_Q4_K = BlockShape(part=32, bits=4, scale="byte", has_minimum=True)
_Q5_K = BlockShape(part=32, bits=5, scale="byte", has_minimum=True)
_Q6_K = BlockShape(part=16, bits=6, zero=32, scale="signed byte")
_IQ4_XS = BlockShape(part=32, bits=4, zero=128, scale="signed byte", table=IQ4_TABLE)
FORMATS = (
    BlockFormat(10, "Q2_K", 256, 84, slice(80, 84), _Q2_K, _split_q2_k),
    BlockFormat(11, "Q3_K", 256, 110, slice(108, 110), _Q3_K, _split_q3_k),
    BlockFormat(12, "Q4_K", 256, 144, slice(0, 4), _Q4_K, _split_k),
    BlockFormat(13, "Q5_K", 256, 176, slice(0, 4), _Q5_K, _split_q5_k),
    BlockFormat(14, "Q6_K", 256, 210, slice(208, 210), _Q6_K, _split_q6_k),
    BlockFormat(23, "IQ4_XS", 256, 136, slice(0, 2), _IQ4_XS, _split_iq4_xs),
)
