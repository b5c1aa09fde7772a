"""Functions of vectors of 16 floats are those of numpy and of transformers."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from card.kernels.int8_linear import why_not_int8
from card.kernels.jit.tables import CLAMPED
from card.kernels.machine_code import machine_code

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
if REASON is None:
    activate: Any = machine_code("gates").activate
    load, store = machine_code("vectors").load, machine_code("vectors").store
    logarithm, softplus = machine_code("rows").logarithm, machine_code("rows").softplus


def activate_here(x: int, factor: int, activation: int) -> None:
    activate(x, factor, activation)


def logarithms_here(x: int, count: int) -> None:
    for at in range(0, 4 * count, 64):
        store(x + at, logarithm(load(x + at)))


def softplus_here(x: int, count: int) -> None:
    for at in range(0, 4 * count, 64):
        store(x + at, softplus(load(x + at)))


def computed(function: Any, x: np.ndarray) -> np.ndarray:
    """Return a function of numbers [multiple of 16] by machine code."""
    out = x.astype(np.float32)
    machine_code("vectors").entered(function)(out.ctypes.data, len(out))
    return out


def in_last_places(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return how far numbers are from others of 64 bits, in steps between float32."""
    return np.abs(found.astype(np.float64) - expected) / np.spacing(np.abs(expected).astype(np.float32))


def test_logarithms_are_right_to_two_last_places() -> None:
    bits = np.linspace(0x00800000, 0x7F7FFFFF, 1 << 20).astype(np.int32)
    near_one = np.float32(1) + np.arange(-(1 << 15), 1 << 15).astype(np.float32) / (1 << 22)
    x = np.concatenate([bits.view(np.float32), near_one])
    assert in_last_places(computed(logarithms_here, x), np.log(x.astype(np.float64))).max() < 2


def test_softplus_is_right_from_the_smallest_numbers_to_the_largest() -> None:
    x = np.concatenate([np.linspace(-86, 100, 1 << 18), np.linspace(-1, 1, 1 << 16), [-86.9] * 8, [1e9] * 8])
    x = x.astype(np.float32)
    found, wide = computed(softplus_here, x), x.astype(np.float64)
    assert in_last_places(found, np.logaddexp(0, wide)).max() < 4
    np.testing.assert_allclose(found, torch.nn.functional.softplus(torch.from_numpy(x).double()), rtol=1e-6)


def test_the_clamped_gate_is_that_of_transformers() -> None:
    generator, code = np.random.default_rng(0), machine_code("vectors")
    gate, up = (generator.standard_normal(64).astype(np.float32) * 8 for _ in range(2))
    gate[:8], up[4:12] = (
        [-100.0, -60.0, -7.0, 0.0, 6.9, 7.0, 7.1, 100.0],
        [-100.0, -7.1, -7.0, -1.0, 0.0, 7.0, 7.1, 100.0],
    )
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=16, intermediate_size=16))
    woven = torch.from_numpy(np.stack([gate, up], axis=-1).reshape(-1)).double()
    expected = experts._apply_gate(woven).numpy()
    code.entered(activate_here)(gate.ctypes.data, up.ctypes.data, CLAMPED)
    np.testing.assert_allclose(gate, expected, rtol=2e-6, atol=1e-30)


def digest() -> str:
    """Return a digest of all functions here."""
    code, x = machine_code("vectors"), np.linspace(-80, 80, 1 << 12).astype(np.float32)
    factor, gate = np.ascontiguousarray(x[:64]), np.ascontiguousarray(x[-64:])
    code.entered(activate_here)(gate.ctypes.data, factor.ctypes.data, CLAMPED)
    values = (computed(logarithms_here, np.abs(x) + 1), computed(softplus_here, x), gate)
    return hashlib.sha256(b"".join(one.tobytes() for one in values)).hexdigest()
