"""A block format of GGUF files: its blocks are split, then laid out as machine code reads them.

A format's `split` gives whole numbers and scales exactly as the file holds them; `BlockFormat.pack` lays them out in
panels, as its `BlockShape` says and `card.kernels.jit.block_tiles` reads them. Nothing is rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from card.kernels.number_types import zeros
from card.kernels.packed_linear import GROUP, PANEL, padded

Bytes = npt.NDArray[Any]  # of uint8, which numpy's own types lose in `x & 15`
STEPS = GROUP // 4
STEP_BYTES = 4 * PANEL
SUPER = 256  # inputs of a block whose scales are bytes
ONES = 0x0101010101010101  # bytes, as a word
_LEAST_BYTE = 0x80  # -128
_NO_NUMBER = 255  # of exponents (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)
SMALL = 64  # weights below are multiplied as they are, others as whole bytes
# Weights that four bits of IQ4_NL and IQ4_XS stand for, as bytes around 128.
IQ4_TABLE = tuple(128 + one for one in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))


@dataclass(frozen=True, slots=True)
class Plane:
    """Some bits of all weights of a group, which share their bytes: those of a step with those of later steps."""

    bits: int  # of a weight: 1, 2, 4 or 8
    first: int  # the lowest of them in the weight
    place: int  # of the plane in the group

    @property
    def num_steps(self) -> int:
        """Steps whose bytes hold all of them."""
        return STEPS * self.bits // 8

    @property
    def num_bytes(self) -> int:
        """Bytes of a panel's group."""
        return STEP_BYTES * self.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Layout of one kind of blocks."""

    part: int  # inputs that share a scale: 16 or 32
    bits: int  # of a weight as it is stored: 2 to 6, or 8
    zero: int = 0  # what is subtracted from each weight
    # A byte is multiplied by the half of its block of 256 inputs; an exponent e is 2^(e - 128).
    scale: Literal["half", "byte", "signed byte", "exponent"]
    has_minimum: bool = False  # parts have a smallest weight, kept like the scale
    table: tuple[int, ...] = ()  # the 16 weights that four bits stand for, if they are no weights themselves

    @property
    def parts(self) -> int:
        """Number of parts of a group."""
        return GROUP // self.part

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a part, 16 channels."""
        return PANEL * (2 if self.scale == "half" else 1)

    @property
    def low_place(self) -> int:
        """Place of the weights in a group."""
        return self.parts * self.scale_bytes * (2 if self.has_minimum else 1)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Planes that the bits of weights are stored in, the lowest first."""
        low = next(bits for bits in (8, 4, 2) if bits <= self.bits)
        first = Plane(low, 0, self.low_place)
        return (first, Plane(self.bits - low, low, self.low_place + first.num_bytes)) if self.bits > low else (first,)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of a panel."""
        return self.low_place + sum(plane.num_bytes for plane in self.planes)

    @property
    def header_bytes(self) -> int:
        """Bytes of a panel's header for each 256 inputs; 0 if there is none."""
        return 64 if self.scale in ("byte", "signed byte") else 0

    @property
    def most(self) -> int:
        """The largest weight, before the zero is subtracted."""
        return max(self.table, default=(1 << self.bits) - 1)

    @property
    def is_small(self) -> bool:
        """True if weights are multiplied from zero on; otherwise they are whole bytes around 128."""
        return self.most < SMALL

    def panel_bytes(self, num_groups: int) -> int:
        """Return the bytes of a panel."""
        return self.group_bytes * num_groups + self.header_bytes * -(-num_groups * GROUP // SUPER)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of some rows, split: R rows, N blocks in a row, P parts in a block."""

    stored: Bytes  # [R, N, inputs]; or the planes of groups of 64 as panels have them, [R, groups, 8 * bits]
    scales: Bytes  # [R, N, P] bytes, or [R, N, 2] where one half is the block's whole scale
    minima: Bytes | None = None  # in the same form
    header: Bytes | None = None  # [R, N, 64 / 16]: the halves that scales and minima are times, the second one negative
    are_planes: bool = False


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One of GGUF's quantised types that runs as it is: all that its file says, and what follows from it."""

    type_id: int  # ggml's number of it
    name: str  # ggml's
    inputs: int  # of a block
    num_bytes: int  # of a block
    halves: slice  # its bytes that are numbers of 16 bits; for a scale that is an exponent, the byte of it
    shape: BlockShape  # of the panels that machine code reads
    split: Callable[[Bytes], Blocks]  # [R, N, num_bytes] to what it holds

    @property
    def product(self) -> str:
        """The name that machine code knows it by."""
        return self.name.lower()

    def panel_bytes(self, num_in: int) -> int:
        """Return the bytes of 16 output channels with so many inputs."""
        return self.shape.panel_bytes(padded(num_in, GROUP) // GROUP)

    def numbers(self, raw: Bytes) -> npt.NDArray[np.float32]:
        """Return the numbers [R, in] that rows of blocks [R, bytes] stand for, as llama.cpp computes them."""
        shape, blocks = self.shape, self.split(raw.reshape(len(raw), -1, self.num_bytes))
        numbers = _numbers(blocks.stored, shape) if blocks.are_planes else blocks.stored
        stored = numbers.reshape(len(raw), -1, self.inputs // shape.part, shape.part)
        if shape.table:
            parts = (np.array(shape.table) - shape.zero).astype(np.int8)[stored]
        else:
            parts = stored.astype(np.int8)
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
        if self.shape.scale == "exponent":
            wide = stored.astype(np.uint32)
            bits = np.where(wide < 2, wide + 1 << 21, wide - 1 << 23)  # below 2^-126 numbers are denormal
            return bits.astype(np.uint32).view(np.float32)[..., None]
        if header is None:
            return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)[..., None]
        is_signed = self.shape.scale == "signed byte"
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
        shape, num_panels = self.shape, len(panels)
        start = shape.panel_bytes(num_groups) - shape.group_bytes * num_groups
        if shape.header_bytes:
            header = panels[:, :start].reshape(num_panels, -1, shape.header_bytes)
            yield header.view(np.uint16).reshape(num_panels, header.shape[1], -1, PANEL)
        groups = panels[:, start:].reshape(num_panels, num_groups, shape.group_bytes)
        factors = groups[..., : shape.low_place].view(np.uint16 if shape.scale == "half" else np.uint8)
        yield factors.reshape(num_panels, num_groups, -1, PANEL)
        yield groups[..., shape.low_place :].view(np.uint32).reshape(num_panels, num_groups, -1, PANEL)

    def check(self, raw: Bytes) -> None:
        """Check the scales of rows of blocks [R, bytes]. Raises: ValueError if one is no finite number."""
        scales = np.ascontiguousarray(raw.reshape(len(raw), -1, self.num_bytes)[..., self.halves])
        is_exponent = self.shape.scale == "exponent"
        if not (scales != _NO_NUMBER if is_exponent else np.isfinite(scales.view(np.float16))).all():
            raise ValueError("a scale in it is no finite number; copy or download the file again")

    def pack(self, raw: Bytes, panels: Bytes) -> None:
        """Write rows of blocks [out, bytes] to panels [ceil(out / 16), `panel_bytes`], which hold zeros.

        Raises: ValueError if a block holds a number that the products cannot take.
        """
        self.check(raw)
        raw = raw.reshape(len(raw), -1, self.num_bytes)
        if len(raw) % PANEL:
            raw = np.concatenate([raw, np.zeros((-len(raw) % PANEL, *raw.shape[1:]), np.uint8)])
        shape, blocks = self.shape, self.split(raw)
        num_groups = padded(raw.shape[1] * self.inputs, GROUP) // GROUP
        factors = [
            _padded(one.reshape(len(raw), -1), num_groups * shape.parts * shape.scale_bytes // PANEL).reshape(
                len(raw), num_groups, -1
            )
            for one in (blocks.scales, blocks.minima)
            if one is not None
        ]
        stored = blocks.stored.reshape(len(raw), -1)
        if blocks.are_planes:
            steps = stored.reshape(len(raw), num_groups, -1)
        else:
            steps = _steps(_padded(stored, num_groups * GROUP).reshape(len(raw), num_groups, GROUP), shape)
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


def _steps(numbers: Bytes, shape: BlockShape) -> Bytes:
    """Return numbers [R, groups, 64] as the bytes of a channel in a group, [R, groups, 8 * bits]."""
    if shape.bits == 8:
        if (numbers == _LEAST_BYTE).any():
            raise ValueError("it holds the number -128, which integer products cannot take; use --dtype int8")
        return numbers ^ np.uint8(_LEAST_BYTE)
    return np.concatenate([_plane(numbers, plane) for plane in shape.planes], axis=-1)


def _plane(numbers: Bytes, plane: Plane) -> Bytes:
    """Return some bits of numbers [R, groups, 64] as bytes, [R, groups, 8 * bits]."""
    mask = np.uint64(ONES * ((1 << plane.bits) - 1))
    words = numbers.view(np.uint64) >> np.uint64(plane.first) & mask  # eight bytes at once
    steps = words.reshape(*numbers.shape[:2], 8 // plane.bits, plane.bits)
    together = steps[..., 0, :].copy()
    for i in range(1, 8 // plane.bits):
        together |= steps[..., i, :] << np.uint64(plane.bits * i)
    return together.view(np.uint8)


def _numbers(planes: Bytes, shape: BlockShape) -> Bytes:
    """Return the numbers [R, groups, 64] of planes [R, groups, 8 * bits]: what `_plane` has taken apart."""
    numbers, first = np.zeros((*planes.shape[:2], GROUP), np.uint8), 0
    for plane in shape.planes:
        words = np.ascontiguousarray(planes[..., first : first + STEPS * plane.bits // 2]).view(np.uint64)
        mask, first = np.uint64(ONES * ((1 << plane.bits) - 1)), first + STEPS * plane.bits // 2
        steps = [words >> np.uint64(plane.bits * i) & mask for i in range(8 // plane.bits)]
        numbers |= np.concatenate(steps, axis=-1).view(np.uint8) << np.uint8(plane.first)
    return numbers


def low_planes(first: Bytes, second: Bytes, out: Bytes) -> None:
    """Write planes of four bits, words [..., 2, n]: of the lower halves of the bytes of words [..., n], and the upper.

    In each byte of a plane, the first words' half is the lower one.
    """
    low, high = np.uint64(ONES * 15), np.uint64(ONES * 240)
    out[..., 0, :] = first & low | (second & low) << np.uint64(4)
    out[..., 1, :] = first >> np.uint64(4) & low | second & high


def nibbles(values: Bytes) -> Bytes:
    """Return lower halves, then upper halves of the last dimension's bytes."""
    return np.concatenate([values & 15, values >> 4], axis=-1)


def pairs_of_32(values: Bytes) -> Bytes:
    """Return numbers [R, N, 256] of bytes [R, N, 128]: of each 32 the lower halves, then the upper ones."""
    return nibbles(values.reshape(*values.shape[:2], 4, 32)).reshape(*values.shape[:2], -1)
