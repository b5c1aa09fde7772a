"""K blocks: 256 numbers, whose parts have scales of six or eight bits times one of 16 bits."""

from __future__ import annotations

from functools import partial

import numpy as np

from card.kernels.formats.block_format import BlockFormat, Blocks, BlockShape, Bytes, nibbles, pairs_of_32

_ONES = 0x0101010101010101
_FOUR_BITS, _SIX_BITS, _UPPER_BITS = (np.uint32(0x01010101 * byte) for byte in (0x0F, 0x3F, 0x30))  # of each byte


def _packed_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    """Return the eight scales and eight smallest weights, six bits each, of the 12 bytes of a K block."""
    words = np.ascontiguousarray(raw).view(np.uint32)  # four bytes at once
    first, second, third = words[..., 0], words[..., 1], words[..., 2]
    upper = [(one >> 2) & _UPPER_BITS for one in (first, second)]
    scales = np.stack([first & _SIX_BITS, (third & _FOUR_BITS) | upper[0]], axis=-1)
    minima = np.stack([second & _SIX_BITS, (third >> 4 & _FOUR_BITS) | upper[1]], axis=-1)
    return scales.view(np.uint8), minima.view(np.uint8)


def _halves(raw: Bytes) -> Bytes:
    """Return scale and smallest weight of a K block; the latter is subtracted, so it gets the other sign."""
    halves = raw[..., :4].copy()
    halves[..., 3] ^= 0x80
    return halves


def _upper_bits(packed: Bytes, bits: int) -> Bytes:
    """Return what numbers [R, N, inputs] have above four bits, of bytes [R, N, n].

    Each 32 bytes hold as many bits for each of the next 32 numbers, then for the 32 behind these, and so on.
    """
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(-1, 4)  # eight bytes at once
    mask, out = np.uint64(_ONES * ((1 << bits) - 1) << 4), np.empty((len(words), 8 // bits, 4), np.uint64)
    for i in range(8 // bits):
        left = 4 - bits * i
        moved = words << np.uint64(left) if left >= 0 else words >> np.uint64(-left)
        np.bitwise_and(moved, mask, out=out[:, i])
    return out.view(np.uint8).reshape(*packed.shape[:2], -1)


def _split_k(raw: Bytes, *, has_fifth_bits: bool = False) -> Blocks:
    """Split blocks of 256 numbers of four or five bits."""
    factors = *_packed_scales(raw[..., 4:16]), _halves(raw)
    if not has_fifth_bits:
        return Blocks(raw[..., 16:], *factors, are_halves=True)
    numbers = pairs_of_32(raw[..., 48:])
    numbers |= _upper_bits(raw[..., 16:48], 1)
    return Blocks(numbers, *factors)


def _split_q6_k(raw: Bytes) -> Blocks:
    numbers = nibbles(raw[..., :128].reshape(*raw.shape[:2], 2, 64)).reshape(*raw.shape[:2], -1)
    numbers |= _upper_bits(raw[..., 128:192], 2)
    header = np.zeros((*raw.shape[:2], 4), np.uint8)
    header[..., :2] = raw[..., 208:]
    return Blocks(numbers, raw[..., 192:208], None, header)


_split_q5_k = partial(_split_k, has_fifth_bits=True)
_Q4_K = BlockShape(part=32, bits=4, scale="byte", has_minimum=True)
_Q5_K = BlockShape(part=32, bits=5, scale="byte", has_minimum=True)
_Q6_K = BlockShape(part=16, bits=6, zero=32, scale="signed byte")
FORMATS = (
    BlockFormat(12, "Q4_K", 256, 144, slice(0, 4), _Q4_K, _split_k),
    BlockFormat(13, "Q5_K", 256, 176, slice(0, 4), _Q5_K, _split_q5_k),
    BlockFormat(14, "Q6_K", 256, 210, slice(208, 210), _Q6_K, _split_q6_k),
)
