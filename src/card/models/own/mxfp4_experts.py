"""Experts of safetensors folders in MXFP4, as gpt-oss is published: multiplied as they are stored, or as numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from card.errors import ModelError
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import Bytes
from card.kernels.number_types import BFLOAT16, FLOAT32, Array, Dtype, empty, zeros
from card.kernels.packed_linear import PANEL
from card.machine.container import num_usable_cores
from card.models.architectures import Architecture
from card.models.files.mxfp4 import gguf_blocks
from card.models.own.expert_weights import halves
from card.models.own.layers import BlockWeight, Weight

_QUANTIZATION, _METHOD = "quantization_config", "mxfp4"
_TENSOR = re.compile(r"(?P<stem>(?P<block>.*\.experts)\.(?P<kind>gate_up|down)_proj)_(blocks|scales)")
_FORM = BLOCK_FORMATS[39]
_ROWS = 20 * PANEL  # that are packed at once


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


def mxfp4_experts(stored: Mapping[str, Array], architecture: Architecture, dtype: Dtype | None) -> dict[str, Weight]:
    """Return the weights of all experts that are in MXFP4, one by one.

    Args:
        stored: tensors of a folder by name; all but those of `is_mxfp4` are left aside.
        dtype: of the numbers that the blocks stand for; None: they stay blocks.
    Raises: ModelError that names a tensor which is missing, has another shape, or holds a scale that is no number.
    """
    found = {match["stem"]: match for name in stored if (match := _match(name, architecture)) is not None}
    tensors = [one for match in found.values() for one in _each(match, stored, architecture)]
    with ThreadPoolExecutor(num_usable_cores()) as threads:
        weights = threads.map(lambda one: _weight(one[0], one[1], one[2], dtype), tensors)
        return {one[0]: weight for one, weight in zip(tensors, weights, strict=True)}


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


def _each(
    found: re.Match[str], stored: Mapping[str, Array], architecture: Architecture
) -> Iterator[tuple[str, Array, Array]]:
    """Yield the name of each expert's weight, its blocks [out, in / 32, 16] and their scales [out, in / 32]."""
    names = [f"{found['stem']}_{what}" for what in ("blocks", "scales")]
    if missing := [name for name in names if name not in stored]:
        raise ModelError(f"{missing[0]} is missing; download it again")
    blocks, scales = (stored[name] for name in names)
    if blocks.ndim != 4 or scales.shape != blocks.shape[:3]:
        raise ModelError(
            f"{names[0]} has shape {list(blocks.shape)} and {names[1]} {list(scales.shape)}, they must be "
            "[experts, out, in / 32, 16] and the same without 16; download it again"
        )
    kinds = ("down",) if found["kind"] == "down" else ("gate", "up")
    for expert, (its, its_scales) in enumerate(zip(blocks, scales, strict=True)):
        both = [(its, its_scales)]
        if len(kinds) > 1:
            both = list(zip(halves(its, architecture), halves(its_scales, architecture), strict=True))
        for kind, pair in zip(kinds, both, strict=True):
            yield f"{found['block']}.{expert}.{kind}_proj.weight", *pair


def _weight(name: str, blocks: Array, scales: Array, dtype: Dtype | None) -> Weight:
    """Return a weight [out, in] of its blocks, or its numbers."""
    shape = len(blocks), blocks.shape[1] * _FORM.inputs
    try:
        if dtype is None:
            panels = zeros((-(-shape[0] // PANEL), _FORM.panel_bytes(shape[1])), np.uint8)
            for first, raw in _raw_rows(blocks, scales):
                _FORM.pack(raw, panels[first // PANEL : (first + _ROWS) // PANEL])
            return BlockWeight(_FORM.type_id, panels, shape)
        numbers = empty(shape, dtype)
        for first, raw in _raw_rows(blocks, scales):
            _FORM.check(raw)
            numbers[first : first + _ROWS] = _FORM.numbers(raw)
        return numbers
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error


def _raw_rows(blocks: Array, scales: Array) -> Iterator[tuple[int, Bytes]]:
    """Yield blocks as GGUF has them, some rows at a time: what is made of them stays in the core's cache."""
    for first in range(0, len(blocks), _ROWS):
        rows = slice(first, first + _ROWS)
        yield first, gguf_blocks(blocks[rows], scales[rows])
