"""Functions that become machine code compute what Python computes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code
from tests.examples import settings

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
STEP, HALF = 3, np.float32(0.5)
WHOLE = st.integers(-1000, 1000)
store_float: Any = machine_code("vectors").store_float if REASON is None else None


def arithmetic(a: int, b: int, c: int) -> int:
    """Every operator on whole numbers, with constants and without; only the branch that is taken is computed."""
    x, y = a + b * STEP - c, -a
    x, y = y, x
    total = x // 8 + y % 8 + (a // b if b else 7) + (a % b if b else 0) + (x & 12 | y & 3)
    total += min(a, b) + max(a, STEP) - min(STEP * 2, c)
    return total + int(a <= b) if a != c else 4 * STEP // 5


def loops(a: int, b: int, c: int) -> int:
    """Loops in each other, with rounds that are cut short; what they go over is known when they begin."""
    total = first = 0
    for i in range(a % 20):
        if i % 3 == 1:
            continue
        for j in range(i, b % 30, STEP):
            total += i * j
            i = i + 1  # noqa: PLW2901
        first = i
    while total > c and not (c == 2 or total == 2 * c):
        total = total // 2 - 1
        if total % 5 == 4:
            return -total
    for one, other in ((a, b), (b, c), (total, 1)):
        if one > other:
            continue
        total += one * 2 + other
    return total + first


def guarded(a: int, b: int, c: int) -> int:
    """`and` and `or` look no further than they must: Python would not divide by zero, either."""
    if (b != 0 and a // b > 1) or (c and a % c == 0) or not a:
        return 1
    elif a == -c:
        return 2
    return a + 1 if c > 0 else b


def single_floats(a: int, b: int, c: int) -> int:
    """Single floats, whose last bits decide."""
    x = np.float32(a) / np.float32(3.0)
    y = max(x * HALF, -np.float32(b)) + np.sqrt(np.float32(c * c))
    return int(y > x) + 2 * int(y * y - x <= np.float32(b))


@pytest.fixture(scope="module", params=[arithmetic, loops, guarded, single_floats])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A function and what runs it as machine code."""
    with pytest.MonkeyPatch.context() as patch:
        objects, folder = machine_code("object_code"), tmp_path_factory.mktemp("code")
        patch.setattr(objects, "kept_folder", lambda: folder)
        yield request.param, as_code(request.param)


def as_code(function: Callable[[int, int, int], int]) -> Callable[..., int]:
    """Return what runs a function as machine code."""
    vectors = machine_code("vectors")

    def write(builder: Any, address: Any) -> None:
        values = [vectors.read(builder, vectors.moved(builder, address, 8 * i), vectors.INT) for i in range(3)]
        vectors.write(
            builder, vectors.compiled(function).write(builder, values), vectors.moved(builder, address, 8 * 3)
        )

    code = machine_code("object_code").ObjectCode(function.__name__, write, is_optimized=True)

    def run(*values: int) -> int:
        room = np.array([*values, 0], np.int64)
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address)(room.ctypes.data)
        return int(room[-1])

    return run


@settings(max_examples=100, deadline=None)
@given(a=WHOLE, b=WHOLE, c=WHOLE)
@example(a=-7, b=2, c=-3)
@example(a=7, b=-2, c=3)
@example(a=0, b=0, c=0)
def test_machine_code_gives_the_number_that_python_gives(pair: tuple[Any, Any], a: int, b: int, c: int) -> None:
    function, run = pair
    with np.errstate(over="ignore"):
        assert run(a, b, c) == function(a, b, c)


def test_a_value_of_another_kind_is_refused_where_it_is_used() -> None:
    def constant(a: int, b: int, c: int) -> int:
        return int(a + HALF)

    def variable(a: int, b: int, c: int) -> int:
        a = np.float32(b)  # type: ignore[assignment]
        return a + c

    for function, words in ((constant, "0.5 where i64 belongs"), (variable, "float where i64 belongs")):
        with pytest.raises(AssertionError, match=words):
            as_code(function)


def test_a_compiled_function_takes_whole_numbers_and_floats_from_python() -> None:
    vectors = machine_code("vectors")
    out = np.zeros(1, np.float32)
    vectors.entered(store_sum)(out.ctypes.data, 2.5, 40)
    assert out[0] == 42.5


def store_sum(place: int, x: float, y: int) -> None:
    store_float(place, x + np.float32(y))


def times_plus(code: int, a: int, b: int) -> int:
    return a * b + 1


times_plus_apart: Any = machine_code("vectors").separated(times_plus) if REASON is None else None


def calls_twice(place: int, code: int, a: int) -> None:
    store_float(place, np.float32(times_plus_apart(code, a, times_plus_apart(code, a, 3))))


def test_a_function_with_code_of_its_own_is_called_by_its_address_and_gives_its_result() -> None:
    out = np.zeros(1, np.float32)
    machine_code("vectors").entered(calls_twice)(out.ctypes.data, times_plus_apart.address, 5)
    assert out[0] == 5 * (5 * 3 + 1) + 1
    assert times_plus_apart.address == times_plus_apart.address, "it is compiled once"
