"""Products of GGUF's blocks: the numbers of the file, and bits that depend on a row and a channel alone."""

from __future__ import annotations

import numpy as np
import pytest

from card.kernels.blocks import block_linear, pack_blocks
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import BlockFormat
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import Floats
from card.kernels.packed_linear import GROUP, multiply_rows

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
quants = pytest.importorskip("gguf.quants")
FORMATS = {form.name: (type_id, form) for type_id, form in BLOCK_FORMATS.items()}


def random_blocks(form: BlockFormat, num_out: int, num_in: int, seed: int = 0):
    """Return rows of blocks [num_out, bytes] with any numbers but -128, and scales around 0."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (num_out, num_in // form.inputs, form.num_bytes), dtype=np.uint8)
    raw[raw == 128] = 127
    halves = raw[..., form.halves]
    numbers = generator.standard_normal((*halves.shape[:2], halves.shape[2] // 2)) / 64
    raw[..., form.halves] = numbers.astype(np.float16).view(np.uint8)
    return raw.reshape(num_out, -1)


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
    raw[5, form.halves.start : form.halves.start + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="finite"):
        pack_blocks(raw, form)
