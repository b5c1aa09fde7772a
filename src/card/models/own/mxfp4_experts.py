"""Experts of safetensors folders in MXFP4, as gpt-oss is published: multiplied as they are stored, or as numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from card.errors import ModelError
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import Bytes
from card.kernels.number_types import BFLOAT16, FLOAT32, Array, Dtype, empty, zeros
from card.kernels.packed_linear import PANEL
from card.models.architectures import Architecture
from card.models.files.mxfp4 import gguf_blocks
from card.models.own.expert_weights import halves
from card.models.own.layers import BlockWeight, Weight

_QUANTIZATION, _METHOD = "quantization_config", "mxfp4"
_TENSOR = re.compile(r"(?P<stem>(?P<block>.*\.experts)\.(?P<kind>gate_up|down)_proj)_(blocks|scales)")
_FORM = BLOCK_FORMATS[39]
_ROWS = 20 * PANEL  # that are packed at once


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBlocks:
    """A weight of one expert, as a folder has it."""

    name: str
    blocks: Array  # [out, in / 32, 16]
    scales: Array  # [out, in / 32]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return len(self.blocks), self.blocks.shape[1] * _FORM.inputs

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The shape of its panels, which are bytes."""
        num_out, num_in = self.shape
        return -(-num_out // PANEL), _FORM.panel_bytes(num_in)

    def block_weight(self, panels: Bytes) -> BlockWeight:
        """Return the weight of these panels."""
        return BlockWeight(_FORM.type_id, panels, self.shape)

    def panels(self) -> Bytes:
        """Return the weight as passes read it. Raises: ModelError if a scale is no number."""
        panels = zeros(self.packed_shape, np.uint8)
        with self._named():
            for first, raw in _raw_rows(self.blocks, self.scales):
                _FORM.pack(raw, panels[first // PANEL : (first + _ROWS) // PANEL])
        return panels

    def numbers(self, dtype: Dtype) -> Array:
        """Return the numbers that the blocks stand for. Raises: ModelError if a scale is no number."""
        numbers = empty(self.shape, dtype)
        with self._named():
            for first, raw in _raw_rows(self.blocks, self.scales):
                _FORM.check(raw)
                numbers[first : first + _ROWS] = _FORM.numbers(raw)
        return numbers

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ModelError(f"{self.name}: {error}") from error


def without_mxfp4(raw: Mapping[str, Any], architecture: Architecture) -> Mapping[str, Any]:
    """Return what config.json says, but for experts in MXFP4 if the architecture may have them.

    Published ones do not say what the other weights are in.
    """
    stated = raw.get(_QUANTIZATION)
    if not (isinstance(stated, dict) and stated.get("quant_method") == _METHOD and architecture.interleaves_experts):
        return raw
    dtype = {} if "torch_dtype" in raw else {"dtype": BFLOAT16.name}
    return {**dtype, **{name: one for name, one in raw.items() if name != _QUANTIZATION}}


def is_mxfp4(name: str, architecture: Architecture) -> bool:
    """Return whether a tensor of a folder is experts in MXFP4, or their scales."""
    return _match(name, architecture) is not None


def _match(name: str, architecture: Architecture) -> re.Match[str] | None:
    return _TENSOR.fullmatch(name) if architecture.interleaves_experts else None


def experts_in(stored: Mapping[str, Array], architecture: Architecture) -> list[ExpertBlocks]:
    """Return the weights of all experts that are in MXFP4, one by one; nothing is read of them yet.

    Args:
        stored: tensors of a folder by name; all but those of `is_mxfp4` are left aside.
    Raises: ModelError that names a tensor which is missing or has another shape.
    """
    matches = {match["stem"]: match for name in stored if (match := _match(name, architecture)) is not None}
    return [one for match in matches.values() for one in _each(match, stored, architecture)]


def with_blocks(weights: Mapping[str, Array], blocks: Mapping[str, Weight]) -> dict[str, Weight]:
    """Return weights with experts beside them; norms and biases beside blocks have 32 bits, as in GGUF files."""
    if any(isinstance(one, BlockWeight) for one in blocks.values()):
        weights = {name: one.astype(FLOAT32) if one.ndim == 1 else one for name, one in weights.items()}
    return {**weights, **blocks}


@contextlib.contextmanager
def blocks_explained(blocks: Mapping[str, Weight]) -> Iterator[None]:
    """Name what does not fit a config: of a model with such experts, which transformers would first unpack.

    Raises: ModelError in place of KeyError and ValueError, if there are any.
    """
    try:
        yield
    except (KeyError, ValueError) as error:
        if not blocks:
            raise
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"{what}; download it again") from error


def _each(match: re.Match[str], stored: Mapping[str, Array], architecture: Architecture) -> Iterator[ExpertBlocks]:
    """Yield the weights of each expert."""
    names = [f"{match['stem']}_{what}" for what in ("blocks", "scales")]
    if missing := [name for name in names if name not in stored]:
        raise ModelError(f"{missing[0]} is missing; download it again")
    blocks, scales = (stored[name] for name in names)
    if blocks.ndim != 4 or scales.shape != blocks.shape[:3]:
        raise ModelError(
            f"{names[0]} has shape {list(blocks.shape)} and {names[1]} {list(scales.shape)}, they must be "
            "[experts, out, in / 32, 16] and the same without 16; download it again"
        )
    kinds = ("down",) if match["kind"] == "down" else ("gate", "up")
    for expert, (rows, row_scales) in enumerate(zip(blocks, scales, strict=True)):
        both = [(rows, row_scales)]
        if len(kinds) > 1:
            both = list(zip(halves(rows, architecture), halves(row_scales, architecture), strict=True))
        for kind, pair in zip(kinds, both, strict=True):
            yield ExpertBlocks(f"{match['block']}.{expert}.{kind}_proj.weight", *pair)


def _raw_rows(blocks: Array, scales: Array) -> Iterator[tuple[int, Bytes]]:
    """Yield blocks as GGUF has them, some rows at a time: what is made of them stays in the core's cache."""
    for first in range(0, len(blocks), _ROWS):
        rows = slice(first, first + _ROWS)
        yield first, gguf_blocks(blocks[rows], scales[rows])
