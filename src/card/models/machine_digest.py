"""Digests of what exact passes compute, to prove that a computer gives the same bits as every other one.

A row's logits depend on its text and on the model's numbers alone: sums have one order, and all functions are our own.
So a digest of the logits of fixed texts is the same on every processor and under every kind of kernels.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np

from card.errors import ModelError
from card.kernels.blocks import block_linear, pack_blocks
from card.kernels.float_linear import FLOAT_PRODUCTS, float_linear
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import BlockFormat, Bytes
from card.kernels.int8_linear import quantize_linear, why_not_int8
from card.kernels.number_types import Array, Floats
from card.kernels.packed_linear import multiply_rows
from card.machine.processor import kernel_kind, processor_name
from card.machine.threads import integer_passes_on
from card.models.digest_models import digest_models, fixed_numbers
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel
from card.models.own.layers import BlockWeight, Linear
from card.models.protocol import Extension
from card.models.recording_runner import exact_runner

EXPECTED = "67aede19f1772c5b"
_PROMPT = [3 + 7 * i * i % 500 for i in range(300)]
_TREE_PARENTS = (0, 0, 1, 2, 2)  # rows behind the prompt, counted from its last one
_NUM_IN = 512
_FOUR_BITS, _MXFP4 = 2, 39  # ggml's numbers of Q4_0 and MXFP4
# Numbers of the formats in `EXPECTED`; one that is added is not in it.
DIGESTED = (2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39)
_SIZES = (1, 2, 5, 6, 7, 13, 16, 17, 33)  # rows at once: all kinds of tiles


@dataclass(frozen=True, slots=True)
class MachineDigest:
    """Result of the comparison."""

    processor: str
    kernels: str  # kind of the kernels that computed it
    digest: str
    is_expected: bool


def digest_machine() -> MachineDigest:
    """Compute the digest of this computer with the kernels that this process makes.

    Raises: ModelError if it runs no integer passes.
    """
    kind, reason = kernel_kind(), why_not_int8()
    if reason is not None or kind is None:
        raise ModelError(f"this computer runs no integer passes: {reason}")
    sums = hashlib.sha256()
    for values in chain.from_iterable((_products(), *map(_logits, chain(_models(), digest_models())))):
        sums.update(np.ascontiguousarray(values).data)
    digest = sums.hexdigest()[:16]
    return MachineDigest(processor_name(), kind, digest, is_expected=digest == EXPECTED)


def _products() -> Iterator[Array]:
    """Yield products of few and many rows."""
    rows = fixed_numbers(33 * _NUM_IN).reshape(33, -1) * np.arange(1, 34, dtype=np.float32)[:, None]
    weight = fixed_numbers(150 * _NUM_IN).reshape(150, -1)
    linears = [
        quantize_linear(weight, None),
        *(
            block_linear(pack_blocks(_blocks(form), form), form, 32)
            for form in map(BLOCK_FORMATS.__getitem__, DIGESTED)
        ),
        *(float_linear(weight.astype(dtype), None) for dtype in FLOAT_PRODUCTS),
    ]
    for one in linears:
        for num_rows in _SIZES:
            yield multiply_rows(rows[:num_rows], one, num_parts=2)


def _blocks(form: BlockFormat) -> Bytes:
    """Return 32 rows of blocks [32, bytes] whose bytes have no pattern; their halves are numbers from 0 to 1."""
    shape = 32, _NUM_IN // form.inputs, form.num_bytes
    numbers = np.abs(fixed_numbers(math.prod(shape))).reshape(shape)
    raw = (numbers * 1023).astype(np.uint16).astype(np.uint8)
    raw[raw == 128] = 0  # which the numbers of 8 bits must not be
    if form is BLOCK_FORMATS[_MXFP4]:
        raw[..., 0] = raw[..., 0] % 8 + 120  # an exponent
    else:
        raw[..., form.halves] = (numbers[..., form.halves][..., ::2] / 64).astype(np.float16).view(np.uint8)
    return raw.reshape(32, -1)


def _models() -> Iterator[DecoderModel]:
    """Yield the demo target in 8-bit integers, as it is stored, and with its layers in GGUF's blocks of four bits."""
    yield cast(DecoderModel, load_decoder("demo-target", dtype="int8"))
    model = cast(DecoderModel, load_decoder("demo-target", dtype="bfloat16"))
    yield model
    for layer in model.layers:
        layer.linears = {
            name: Linear(_four_bits(cast(Floats, linear.weight).astype(np.float32)))
            for name, linear in layer.linears.items()
        }
    yield model


def _four_bits(weight: Floats) -> BlockWeight:
    """Return a weight [out, in] in blocks of type Q4_0, each number the nearest of 16."""
    form = BLOCK_FORMATS[_FOUR_BITS]
    parts = weight.reshape(len(weight), -1, form.inputs)
    scales = (np.abs(parts).max(-1, keepdims=True) / np.float32(7)).astype(np.float16)
    steps = parts / np.maximum(scales.astype(np.float32), np.float32(1e-7))
    numbers = np.clip(np.floor(steps + np.float32(8.5)), 0, 15).astype(np.uint8)
    half = form.inputs // 2
    raw = np.concatenate((scales.view(np.uint8), numbers[..., :half] | numbers[..., half:] << 4), -1)
    panels = pack_blocks(raw.reshape(len(weight), -1), form)
    return BlockWeight(_FOUR_BITS, panels, weight.shape)


def _logits(model: DecoderModel) -> Iterator[Array]:
    """Yield logits of a model for a text at once, a tree behind it, and two texts beside each other."""
    runner = exact_runner(model, max_model_len=512, max_tree_rows=32)
    last, parents = len(_PROMPT) - 1, range(-1, len(_PROMPT) - 1)
    for num_threads in (1, 2):
        with integer_passes_on(num_threads):
            first, second = runner.open(), runner.open()
            yield from runner.forward([Extension(first, _PROMPT, parents), Extension(second, _PROMPT[:9], parents[:9])])
            tree = Extension(first, [5, 6, 7, 8, 9], [last + parent for parent in _TREE_PARENTS])
            yield from runner.forward([tree, Extension(second, [11], [8])])
            runner.close(first)
            runner.close(second)
