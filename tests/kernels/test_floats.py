"""Products of weights that are floats: right, in one order, and the same for a row whatever lies beside it."""

from __future__ import annotations

import numpy as np
import pytest

from card.kernels.float_linear import FLOAT_PRODUCTS, float_linear
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Dtype, Floats
from card.kernels.packed_linear import GROUP, multiply_rows

pytestmark = pytest.mark.skipif(why_not_int8() is not None, reason=f"no machine code: {why_not_int8()}")
DTYPES = pytest.mark.parametrize("dtype", FLOAT_PRODUCTS, ids=str)


def _numbers(*shape: int) -> Floats:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@DTYPES
def test_a_product_is_that_of_the_stored_weights_as_near_as_float32_comes(dtype: Dtype) -> None:
    weight, x, bias = _numbers(70, 200).astype(dtype), _numbers(33, 200), _numbers(70)
    weight[0, 0] = 6e-8  # below float16's normal numbers
    out = multiply_rows(x, float_linear(weight, bias, factor=0.5))[:, :70]
    exact = x.astype(np.float64), weight.astype(np.float64).T
    expected = 0.5 * exact[0] @ exact[1] + bias
    largest = (np.abs(exact[0]) @ np.abs(exact[1])).max()
    assert np.abs(out - expected).max() < 200 * 2**-24 * largest


@DTYPES
def test_the_terms_of_a_sum_are_added_in_the_order_of_the_inputs(dtype: Dtype) -> None:
    weight = np.ones((16, 3 * GROUP), dtype)
    x = np.ones((1, 3 * GROUP), np.float32)
    x[0, 0], x[0, -1] = 2.0**24, -(2.0**24)  # ones are lost beside these, and would not be in sums of their own
    assert (multiply_rows(x, float_linear(weight, None)) == 0.0).all()
    x[0, 0], x[0, GROUP] = 1.0, 2.0**24
    x[0, -1] = 1.0
    assert (multiply_rows(x, float_linear(weight, None)) == 2.0**24 + GROUP).all()


@DTYPES
def test_a_row_has_the_bits_that_it_has_alone_in_every_tile_and_share(dtype: Dtype) -> None:
    linear, x = float_linear(_numbers(150, 130).astype(dtype), None), _numbers(35, 130)
    whole = multiply_rows(x, linear)
    for first, count in ((0, 1), (3, 2), (5, 3), (1, 5), (2, 6), (0, 7), (9, 8), (4, 13), (10, 16), (0, 17), (2, 33)):
        rows = x[first : first + count]
        for num_parts in (1, 3):
            assert np.array_equal(multiply_rows(rows, linear, num_parts=num_parts), whole[first : first + count])


def test_outputs_are_filled_up_with_zeros() -> None:
    out = multiply_rows(_numbers(2, 10), float_linear(_numbers(5, 10), None, out_multiple=GROUP))
    assert out.shape == (2, GROUP)
    assert not out[:, 5:].any()
