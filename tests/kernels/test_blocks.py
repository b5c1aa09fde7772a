"""Products of GGUF's blocks: the numbers of the file, and bits that depend on a row and a channel alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from card.kernels.blocks import block_linear, pack_blocks
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import BlockFormat
from card.kernels.int8_linear import why_not_int8
from card.kernels.jit.tables import LinearEntry
from card.kernels.number_types import Floats
from card.kernels.packed_linear import GROUP, multiply_rows
from tests.blocks import random_blocks
from tests.every_kind import each_kind, printed_by

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
quants = pytest.importorskip("gguf.quants")
MANY = 165  # rows whose tiles share expanded weights, whatever the kind of kernels
FORMATS = {form.name: (type_id, form) for type_id, form in BLOCK_FORMATS.items()}


def extreme_blocks(form: BlockFormat):
    """Return rows of blocks [80, bytes] of 512 inputs whose numbers are all alike, with scales around 0."""
    raw = random_blocks(form, 80, 512).reshape(80, -1, form.num_bytes)
    kept = raw[..., form.halves].copy()
    raw[...] = np.repeat(np.arange(0, 255, 51, dtype=np.uint8), 16)[:, None, None]
    if form.name == "Q8_0":
        raw[...] = np.repeat(np.array([127, 129, 1, 255, 0], np.uint8), 16)[:, None, None]
    raw[..., form.halves] = kept
    return raw.reshape(80, -1)


def extreme_rows() -> Floats:
    """Return rows that become the largest bytes, of one sign or of two."""
    signs = np.where(np.arange(512) % np.array([[1], [2], [3], [64]]) == 0, np.float32(1), np.float32(-1))
    return np.concatenate([signs, -signs])


def digest() -> str:
    """Return a digest of products with all formats."""
    sums = hashlib.sha256()
    for form in BLOCK_FORMATS.values():
        for raw, x in ((random_blocks(form, 80, 512), rows(33, 512, 5)), (extreme_blocks(form), extreme_rows())):
            linear = block_linear(pack_blocks(raw, form), form, 80)
            sums.update(multiply_rows(x, linear).tobytes())
            sums.update(multiply_rows(x[:1], linear).tobytes())
            sums.update(multiply_rows(np.tile(x, (MANY // len(x), 1)), linear).tobytes())
    return sums.hexdigest()


def width_of(form: BlockFormat) -> int:
    """Return a number of inputs that is not whole groups where the format allows one."""
    return 512 if form.inputs == 256 else 480


def rows(num_rows: int, width: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((num_rows, width), np.float32)


def rounded_as_activations(x: Floats) -> Floats:
    """Return what is left of rows when each 64 of them are bytes with a scale."""
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)
    scales = np.maximum(np.abs(groups).max(-1, keepdims=True), np.float32(1e-30)) / np.float32(127)
    return (np.rint(groups / scales) * scales).reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_numbers_that_the_file_stands_for(name: str) -> None:
    type_id, form = FORMATS[name]
    raw = random_blocks(form, 70, width_of(form))
    weight = quants.dequantize(raw, quants.GGMLQuantizationType(type_id)).astype(np.float64)
    x = rows(9, width_of(form), 1)
    expected = rounded_as_activations(x).astype(np.float64) @ weight.T
    out = multiply_rows(x, block_linear(pack_blocks(raw, form), form, 70))[:, :70].astype(np.float64)
    assert np.abs(out - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_unpacked_to_the_numbers_of_ggml(name: str) -> None:
    type_id, form = FORMATS[name]
    raw = random_blocks(form, 5, 512)
    assert np.array_equal(form.numbers(raw), quants.dequantize(raw, quants.GGMLQuantizationType(type_id)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_of_a_product_depend_on_its_row_and_channel_alone(name: str) -> None:
    _, form = FORMATS[name]
    linear = block_linear(pack_blocks(random_blocks(form, 70, width_of(form)), form), form, 70)
    x = rows(33, width_of(form), 2)
    whole = multiply_rows(x, linear)
    for first, count in ((0, 1), (3, 2), (1, 5), (4, 7), (0, 13), (0, 16), (2, 17)):
        assert np.array_equal(
            multiply_rows(x[first : first + count], linear, num_parts=2), whole[first : first + count]
        )


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_many_tiles_share_are_expanded_to_the_same_products(name: str) -> None:
    _, form = FORMATS[name]
    linear = block_linear(pack_blocks(random_blocks(form, 150, width_of(form)), form), form, 150)
    x = rows(MANY, width_of(form), 6)
    is_expanded = linear.entry[LinearEntry.expander] != 0
    assert is_expanded == (name != "Q8_0")  # whose weights are bytes already
    assert np.array_equal(multiply_rows(x, linear), multiply_rows(x, linear, expands=False))


def test_factor_bias_and_padding_are_those_of_the_layer() -> None:
    form = FORMATS["Q4_K"][1]
    raw, bias = random_blocks(form, 20, 256), np.arange(20, dtype=np.float32)
    x = rows(3, 256, 3)
    panels = pack_blocks(raw, form)
    plain = multiply_rows(x, block_linear(panels, form, 20))
    out = multiply_rows(x, block_linear(panels, form, 20, factor=2.0, bias=bias, out_multiple=GROUP))
    assert out.shape == (3, GROUP)
    assert np.array_equal(out[:, :20], 2 * plain[:, :20] + bias)
    assert not out[:, 20:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_chosen_channels_are_those_of_the_whole_layer(name: str) -> None:
    _, form = FORMATS[name]
    raw, channels = random_blocks(form, 70, width_of(form)), np.array([69, 3, 4, 17, 40])
    whole = pack_blocks(raw, form)
    x = rows(2, width_of(form), 4)
    chosen = block_linear(form.select(whole, width_of(form), channels), form, len(channels))
    assert np.array_equal(multiply_rows(x, chosen)[:, :5], multiply_rows(x, block_linear(whole, form, 70))[:, channels])


def test_the_number_that_integer_products_cannot_take_is_refused() -> None:
    form = FORMATS["Q8_0"][1]
    raw = random_blocks(form, 16, 64)
    raw[3, 7] = 0x80
    with pytest.raises(ValueError, match="-128"):
        pack_blocks(raw, form)


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_is_no_number_is_refused(name: str) -> None:
    _, form = FORMATS[name]
    raw = random_blocks(form, 16, 256)
    first = form.halves.start
    if form.shape.scale == "exponent":
        raw[5, first] = 255
    else:
        raw[5, first : first + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="finite"):
        pack_blocks(raw, form)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 200])
def test_scales_that_are_powers_of_two_stay_exact_down_to_denormal_numbers(exponent: int) -> None:
    type_id, form = FORMATS["MXFP4"]
    raw = random_blocks(form, 16, 64)
    raw.reshape(16, 2, 17)[..., 0] = exponent
    weight = quants.dequantize(raw, quants.GGMLQuantizationType(type_id)).astype(np.float64)
    assert np.array_equal(form.numbers(raw), weight.astype(np.float32)) and weight.any()
    x = np.full((3, 64), 2.0**20, np.float32)
    out = multiply_rows(x, block_linear(pack_blocks(raw, form), form, 16))
    np.testing.assert_allclose(out, x.astype(np.float64) @ weight.T, rtol=1e-6, atol=2.0**-149)


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_numbers_do_not_overflow(name: str) -> None:
    type_id, form = FORMATS[name]
    raw, x = extreme_blocks(form), extreme_rows()
    expected = x.astype(np.float64) @ quants.dequantize(raw, quants.GGMLQuantizationType(type_id)).astype(np.float64).T
    out = multiply_rows(x, block_linear(pack_blocks(raw, form), form, len(raw)))[:, : len(raw)]
    assert np.abs(out - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.timeout(240)
@each_kind
def test_every_kind_of_kernel_computes_the_same_bits(kind: str) -> None:
    """Of the formats that the digest of machines leaves out."""
    assert printed_by(kind, "from tests.kernels.test_blocks import digest; print(digest())") == digest()
