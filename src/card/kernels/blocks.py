"""Linear layers of GGUF's quantised blocks, packed for the machine code without rounding anything again.

A format's decoder splits the blocks of some rows into whole numbers and scales, exactly as the file holds them; `pack`
lays them out as `card.kernels.jit.block_tiles` reads them. The layout of blocks is ggml's
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from card.kernels.machine_code import machine_code
from card.kernels.number_types import Array, zeros
from card.kernels.packed_linear import GROUP, PANEL, PackedLinear, extended, padded

Bytes = npt.NDArray[Any]  # of uint8, which numpy's own types lose in `x & 15`
_LEAST_BYTE = 0x80  # -128
_FOUR, _LOWER_HALVES, _ONES = np.uint64(4), np.uint64(0x0F0F0F0F0F0F0F0F), 0x0101010101010101
_FOUR_BITS, _SIX_BITS, _UPPER_BITS = (np.uint32(0x01010101 * byte) for byte in (0x0F, 0x3F, 0x30))  # of each byte


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of some rows, split: R rows, N blocks in a row, P parts in a block."""

    stored: Bytes  # [R, N, inputs], or [R, N, inputs / 2] where a group's bytes are halves as panels have them, too
    scales: Bytes  # [R, N, P] bytes, or [R, N, 2] where one half is the block's whole scale
    minima: Bytes | None = None  # in the same form
    header: Bytes | None = None  # [R, N, 64 / 16]: the halves that scales and minima are times, the second one negative
    are_halves: bool = False

    @property
    def numbers(self) -> Bytes:
        """The numbers [R, N, inputs]."""
        return _pairs_of_32(self.stored) if self.are_halves else self.stored


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One of GGUF's quantised types that runs as it is."""

    name: str  # ggml's
    product: str  # one of the formats of `card.kernels.jit.formats`
    inputs: int  # of a block
    num_bytes: int  # of a block
    halves: slice  # its bytes that are numbers of 16 bits
    split: Callable[[Bytes], _Blocks]  # [R, N, num_bytes] to what it holds

    @property
    def _shape(self) -> Any:
        return machine_code("formats").SHAPES[self.product]

    def panel_bytes(self, num_in: int) -> int:
        """Return the bytes of 16 output channels with so many inputs."""
        return int(self._shape.panel_bytes(padded(num_in, GROUP) // GROUP))

    def numbers(self, raw: Bytes) -> npt.NDArray[np.float32]:
        """Return the numbers [R, in] that rows of blocks [R, bytes] stand for, as llama.cpp computes them."""
        shape, blocks = self._shape, self.split(raw.reshape(len(raw), -1, self.num_bytes))
        parts = blocks.numbers.reshape(*blocks.numbers.shape[:2], -1, shape.part).astype(np.int8)
        if shape.bits < 8:
            parts -= np.int8(shape.zero)
        values: npt.NDArray[np.float32] = np.multiply(
            parts, self._factors(blocks.scales, blocks.header, 0), dtype=np.float32
        )
        if blocks.minima is not None:
            values += self._factors(blocks.minima, blocks.header, 1)
        return values.reshape(len(raw), -1)

    def _factors(self, stored: Bytes, header: Bytes | None, half: int) -> npt.NDArray[np.float32]:
        """Return the scales or the smallest weights of parts, [R, N, P, 1]."""
        if header is None:
            return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)[..., None]
        is_signed = self._shape.scale == "signed byte"
        whole = np.ascontiguousarray(stored).view(np.int8) if is_signed else stored
        of_block = header.view(np.float16)[..., half : half + 1].astype(np.float32)
        factors: npt.NDArray[np.float32] = np.multiply(whole, of_block, dtype=np.float32)
        return factors[..., None]

    def select(self, panels: Bytes, num_in: int, channels: npt.NDArray[np.int64]) -> Bytes:
        """Return panels of some output channels of a layer with so many inputs."""
        num_groups = padded(num_in, GROUP) // GROUP
        chosen = zeros((-(-len(channels) // PANEL), panels.shape[1]), np.uint8)
        for source, room in zip(self._regions(panels, num_groups), self._regions(chosen, num_groups), strict=True):
            part = source[channels // PANEL, :, :, channels % PANEL]
            rest = np.zeros((-len(channels) % PANEL, *part.shape[1:]), part.dtype)
            room[...] = _by_channel(np.concatenate([part, rest]))
        return chosen

    def _regions(self, panels: Bytes, num_groups: int) -> Iterator[npt.NDArray[Any]]:
        """Yield views [panels, blocks or groups, values, 16] of all that panels hold of their channels.

        First the header's halves, if there is a header; then scales, smallest weights, and steps of weights.
        """
        shape, num_panels = self._shape, len(panels)
        start = shape.panel_bytes(num_groups) - shape.group_bytes * num_groups
        if shape.header_bytes:
            header = panels[:, :start].reshape(num_panels, -1, shape.header_bytes)
            yield header.view(np.uint16).reshape(num_panels, header.shape[1], -1, PANEL)
        groups = panels[:, start:].reshape(num_panels, num_groups, shape.group_bytes)
        factors = groups[..., : shape.low_place].view(np.uint16 if shape.scale == "half" else np.uint8)
        yield factors.reshape(num_panels, num_groups, -1, PANEL)
        yield groups[..., shape.low_place :].view(np.uint32).reshape(num_panels, num_groups, -1, PANEL)

    def pack(self, raw: Bytes, panels: Bytes) -> None:
        """Write rows of blocks [out, bytes] to panels [ceil(out / 16), `panel_bytes`], which hold zeros.

        Raises: ValueError if a block holds a number that the products cannot take.
        """
        raw = raw.reshape(len(raw), -1, self.num_bytes)
        if not np.isfinite(np.ascontiguousarray(raw[..., self.halves]).view(np.float16)).all():
            raise ValueError("a scale in it is no finite number; copy or download the file again")
        if len(raw) % PANEL:
            raw = np.concatenate([raw, np.zeros((-len(raw) % PANEL, *raw.shape[1:]), np.uint8)])
        shape, blocks = self._shape, self.split(raw)
        num_groups = padded(raw.shape[1] * self.inputs, GROUP) // GROUP
        factors = [
            _padded(one.reshape(len(raw), -1), num_groups * shape.parts * shape.scale_bytes // PANEL).reshape(
                len(raw), num_groups, -1
            )
            for one in (blocks.scales, blocks.minima)
            if one is not None
        ]
        stored = blocks.stored.reshape(len(raw), -1)
        if blocks.are_halves:  # of whole groups
            steps = stored.reshape(len(raw), num_groups, -1)
        else:
            steps = _steps(_padded(stored, num_groups * GROUP).reshape(len(raw), num_groups, GROUP), shape.bits)
        header = [] if blocks.header is None else [blocks.header]
        values = [*header, np.concatenate(factors, axis=-1), steps]
        for room, value in zip(self._regions(panels, num_groups), values, strict=True):
            room[...] = _by_channel(value.view(room.dtype))


def _padded(values: Bytes, size: int) -> Bytes:
    """Return rows [R, n] with zeros behind them, [R, size]."""
    if values.shape[1] == size:
        return np.ascontiguousarray(values)
    out = np.zeros((len(values), size), np.uint8)
    out[:, : values.shape[1]] = values
    return out


def _by_channel(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return [rows, groups, n] as [panels, groups, n, 16]: 16 channels beside each other."""
    return values.reshape(-1, PANEL, *values.shape[1:]).transpose(0, 2, 3, 1)


def _steps(numbers: Bytes, bits: int) -> Bytes:
    """Return numbers [R, groups, 64] as the bytes of a channel in a group, [R, groups, 8 * bits]."""
    if bits == 8:
        if (numbers == _LEAST_BYTE).any():
            raise ValueError("it holds the number -128, which integer products cannot take; use --dtype int8")
        return numbers ^ np.uint8(_LEAST_BYTE)
    half = GROUP // 2
    low = (numbers[..., :half] & 15) | (numbers[..., half:] << 4)
    if bits == 4:
        return low
    high_bits = bits - 4
    words = numbers.view(np.uint64) >> _FOUR & _LOWER_HALVES  # eight bytes at once: none has bits for its neighbour
    steps = words.reshape(*numbers.shape[:2], 8 // high_bits, high_bits)
    high = steps[..., 0, :].copy()
    for i in range(1, 8 // high_bits):
        high |= steps[..., i, :] << np.uint64(high_bits * i)
    return np.concatenate([low, high.view(np.uint8)], axis=-1)


def _nibbles(values: Bytes) -> Bytes:
    """Return lower halves, then upper halves of the last dimension's bytes."""
    return np.concatenate([values & 15, values >> 4], axis=-1)


def _split_32(raw: Bytes, *, has_minimum: bool = False, has_fifth_bits: bool = False) -> _Blocks:
    """Split blocks of 32 numbers of four or five bits."""
    first = 4 if has_minimum else 2
    numbers = _nibbles(raw[..., first + (4 if has_fifth_bits else 0) :])
    if has_fifth_bits:
        numbers |= np.unpackbits(raw[..., first : first + 4], axis=-1, bitorder="little") << 4
    return _Blocks(numbers, raw[..., :2], raw[..., 2:4] if has_minimum else None)


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


def _pairs_of_32(values: Bytes) -> Bytes:
    """Return numbers [R, N, 256] of bytes [R, N, 128]: of each 32 the lower halves, then the upper ones."""
    return _nibbles(values.reshape(*values.shape[:2], 4, 32)).reshape(*values.shape[:2], -1)


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


def _split_k(raw: Bytes, *, has_fifth_bits: bool = False) -> _Blocks:
    """Split blocks of 256 numbers of four or five bits."""
    factors = *_packed_scales(raw[..., 4:16]), _halves(raw)
    if not has_fifth_bits:
        return _Blocks(raw[..., 16:], *factors, are_halves=True)
    numbers = _pairs_of_32(raw[..., 48:])
    numbers |= _upper_bits(raw[..., 16:48], 1)
    return _Blocks(numbers, *factors)


def _split_q6_k(raw: Bytes) -> _Blocks:
    numbers = _nibbles(raw[..., :128].reshape(*raw.shape[:2], 2, 64)).reshape(*raw.shape[:2], -1)
    numbers |= _upper_bits(raw[..., 128:192], 2)
    header = np.zeros((*raw.shape[:2], 4), np.uint8)
    header[..., :2] = raw[..., 208:]
    return _Blocks(numbers, raw[..., 192:208], None, header)


BLOCK_FORMATS: Mapping[int, BlockFormat] = {  # by ggml's number of the type
    2: BlockFormat("Q4_0", "q4_0", 32, 18, slice(0, 2), _split_32),
    3: BlockFormat("Q4_1", "q4_1", 32, 20, slice(0, 4), partial(_split_32, has_minimum=True)),
    6: BlockFormat("Q5_0", "q5_0", 32, 22, slice(0, 2), partial(_split_32, has_fifth_bits=True)),
    7: BlockFormat("Q5_1", "q5_1", 32, 24, slice(0, 4), partial(_split_32, has_minimum=True, has_fifth_bits=True)),
    8: BlockFormat("Q8_0", "q8_0", 32, 34, slice(0, 2), lambda raw: _Blocks(raw[..., 2:], raw[..., :2])),
    12: BlockFormat("Q4_K", "q4_k", 256, 144, slice(0, 4), _split_k),
    13: BlockFormat("Q5_K", "q5_k", 256, 176, slice(0, 4), partial(_split_k, has_fifth_bits=True)),
    14: BlockFormat("Q6_K", "q6_k", 256, 210, slice(208, 210), _split_q6_k),
}


def pack_blocks(raw: Bytes, form: BlockFormat) -> Bytes:
    """Return quantised rows [out, bytes] as panels; those of rows from a multiple of 16 on are a part of all.

    Raises: as `BlockFormat.pack`.
    """
    num_in = raw.shape[1] // form.num_bytes * form.inputs
    panels = zeros((-(-len(raw) // PANEL), form.panel_bytes(num_in)), np.uint8)
    form.pack(raw, panels)
    return panels


def block_linear(
    panels: Bytes,
    form: BlockFormat,
    num_out: int,
    *,
    factor: float = 1.0,
    bias: Array | None = None,
    out_multiple: int = PANEL,
) -> PackedLinear:
    """Return a layer of packed blocks.

    Args:
        factor: what its products are times.
        bias: [out], already times the factor.
        out_multiple: what the number of output channels is filled up to.
    """
    size, packed = padded(num_out, out_multiple), panels
    if more := size // PANEL - len(packed):
        packed = zeros((len(panels) + more, panels.shape[1]), np.uint8)
        packed[: len(panels)] = panels
    return PackedLinear(form.product, packed, np.full(size, factor, np.float32), extended(bias, size))
