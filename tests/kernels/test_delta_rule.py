"""The gated delta rule is that of transformers, and a record of a row repeats what it did to the state."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ROWS = 7


@functools.cache
def _entered(name: str) -> Callable[..., None]:
    """Return a function that passes call, for Python to call."""
    entered: Callable[..., None] = machine_code("vectors").entered(getattr(machine_code("delta_rule"), name))
    return entered


@dataclass
class Head:
    """Rows of one head, and the state before them."""

    state: np.ndarray  # [key size, value size]
    query: np.ndarray  # [rows, key size]
    key: np.ndarray
    value: np.ndarray  # [rows, value size]
    log_decay: np.ndarray  # [rows]
    beta: np.ndarray


def random_head(key_size: int, value_size: int, seed: int = 0) -> Head:
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32)

    query, key = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (normal(ROWS, key_size) for _ in "qk"))
    log_decay, beta = -np.exp(normal(ROWS)), 1 / (1 + np.exp(-normal(ROWS)))
    return Head(normal(key_size, value_size), query, key, normal(ROWS, value_size), log_decay, beta)


def advanced(head: Head, source: np.ndarray, state: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute a row by machine code; return what it wrote and its output."""
    delta, out = (np.full_like(head.value[row], np.nan) for _ in range(2))
    query = head.query[row] / np.float32(np.sqrt(head.query.shape[1]))
    places = (array.ctypes.data for array in (query, head.key[row], head.value[row]))
    _entered("advance")(
        source.ctypes.data, state.ctypes.data, *state.shape, *places, head.beta[row], np.exp(head.log_decay[row]),
        delta.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    return delta, out


def repeated(head: Head, state: np.ndarray, row: int, delta: np.ndarray) -> None:
    _entered("repeat")(
        state.ctypes.data, state.ctypes.data, *state.shape, head.key[row].ctypes.data, np.exp(head.log_decay[row]),
        delta.ctypes.data,
    )  # fmt: skip


@pytest.mark.parametrize(("key_size", "value_size"), [(128, 128), (16, 16), (40, 80), (128, 48)])
def test_rows_are_those_of_transformers(key_size: int, value_size: int) -> None:
    head = random_head(key_size, value_size)
    arrays = (head.query, head.key, head.value, head.log_decay, head.beta)
    rows = (torch.from_numpy(one)[None, :, None] for one in arrays)
    expected, last = torch_recurrent_gated_delta_rule(
        *rows, initial_state=torch.from_numpy(head.state)[None, None], output_final_state=True
    )
    state = head.state.copy()
    for row in range(ROWS):
        _, out = advanced(head, state, state, row)
        np.testing.assert_allclose(out, expected[0, row, 0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state, last[0, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value_size", [16, 80, 128])
def test_a_record_repeats_the_bits_that_its_row_wrote(value_size: int) -> None:
    head = random_head(32, value_size, seed=1)
    state, scratch = head.state.copy(), np.empty_like(head.state)
    deltas = []
    for row in range(ROWS):  # each on a scratch, as rows are before it is known which are kept
        delta, out = advanced(head, state if row == 0 else scratch, scratch, row)
        deltas.append(delta)
        assert np.isfinite(out).all()
    assert np.array_equal(state, head.state), "what a row starts from is left as it was"
    for row, delta in enumerate(deltas):
        repeated(head, state, row, delta)
    assert np.array_equal(state, scratch)


def test_a_column_does_not_depend_on_those_beside_it() -> None:
    head = random_head(24, 112, seed=2)
    whole = head.state.copy()
    _, out = advanced(head, whole, whole, 0)
    for first, last in ((0, 16), (16, 80), (96, 112)):
        part = Head(
            head.state[:, first:last], head.query, head.key, head.value[:, first:last].copy(), head.log_decay, head.beta
        )
        state = part.state.copy()
        _, its = advanced(part, state, state, 0)
        assert np.array_equal(its, out[first:last]) and np.array_equal(state, whole[:, first:last])


def test_gates_are_those_of_the_formula() -> None:
    generator = np.random.default_rng(3)
    a, b, bias = (generator.standard_normal(32).astype(np.float32) * 4 for _ in range(3))
    rate = -np.exp(generator.standard_normal(32)).astype(np.float32)
    decay, beta = np.empty(32, np.float32), np.empty(32, np.float32)
    _entered("gates")(*(one.ctypes.data for one in (a, b, rate, bias)), 32, decay.ctypes.data, beta.ctypes.data)
    wide = torch.from_numpy(a + bias).double()
    expected = torch.exp(torch.from_numpy(rate).double() * torch.nn.functional.softplus(wide))
    np.testing.assert_allclose(decay, expected, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(beta, torch.sigmoid(torch.from_numpy(b).double()), rtol=1e-6)


def digest() -> str:
    """Return a digest of the states and outputs of rows."""
    head, sums = random_head(64, 80, seed=4), hashlib.sha256()
    state = head.state.copy()
    for row in range(ROWS):
        for one in advanced(head, state, state, row):
            sums.update(one.tobytes())
    return sums.hexdigest()
