"""Products of GGUF's blocks: the numbers of the file, and bits that depend on a row and a channel alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from card.kernels.blocks import block_linear, pack_blocks
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import BlockFormat
from card.kernels.int8_linear import why_not_int8
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


def rounded_as_activations(x: torch.Tensor) -> torch.Tensor:
    """Return what is left of rows when each 64 of them are bytes with a scale."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((groups / scales).round() * scales).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_numbers_that_the_file_stands_for(name: str) -> None:
    type_id, form = FORMATS[name]
    raw = random_blocks(form, 70, width_of(form))
    weight = torch.from_numpy(quants.dequantize(raw, quants.GGMLQuantizationType(type_id))).double()
    x = torch.randn(9, width_of(form), generator=torch.Generator().manual_seed(1))
    expected = rounded_as_activations(x).double() @ weight.T
    out = multiply_rows(x, block_linear(pack_blocks(raw, form), form, 70))[:, :70].double()
    assert (out - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_unpacked_to_the_numbers_of_ggml(name: str) -> None:
    type_id, form = FORMATS[name]
    raw = random_blocks(form, 5, 512)
    assert np.array_equal(form.numbers(raw), quants.dequantize(raw, quants.GGMLQuantizationType(type_id)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_of_a_product_depend_on_its_row_and_channel_alone(name: str) -> None:
    _, form = FORMATS[name]
    linear = block_linear(pack_blocks(random_blocks(form, 70, width_of(form)), form), form, 70)
    x = torch.randn(33, width_of(form), generator=torch.Generator().manual_seed(2))
    whole = multiply_rows(x, linear)
    for first, count in ((0, 1), (3, 2), (1, 5), (4, 7), (0, 13), (0, 16), (2, 17)):
        assert torch.equal(multiply_rows(x[first : first + count], linear, num_parts=2), whole[first : first + count])


def test_factor_bias_and_padding_are_those_of_the_layer() -> None:
    form = FORMATS["Q4_K"][1]
    raw, bias = random_blocks(form, 20, 256), torch.arange(20.0)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3))
    panels = pack_blocks(raw, form)
    plain = multiply_rows(x, block_linear(panels, form, 20))
    out = multiply_rows(x, block_linear(panels, form, 20, factor=2.0, bias=bias, out_multiple=GROUP))
    assert out.shape == (3, GROUP)
    assert torch.equal(out[:, :20], 2 * plain[:, :20] + bias)
    assert not out[:, 20:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_chosen_channels_are_those_of_the_whole_layer(name: str) -> None:
    _, form = FORMATS[name]
    raw, channels = random_blocks(form, 70, width_of(form)), np.array([69, 3, 4, 17, 40])
    whole = pack_blocks(raw, form)
    x = torch.randn(2, width_of(form), generator=torch.Generator().manual_seed(4))
    chosen = block_linear(form.select(whole, width_of(form), channels), form, len(channels))
    assert torch.equal(multiply_rows(x, chosen)[:, :5], multiply_rows(x, block_linear(whole, form, 70))[:, channels])


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
