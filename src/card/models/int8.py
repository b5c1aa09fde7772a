"""Integer passes on a CPU: 8-bit weights and activations, and logits whose bits depend on a row's text alone.

Every long sum is a sum of integers, which no order, batch, tree, chunk or number of threads can change:

- A linear layer multiplies 8-bit integers: weights with a scale for each output channel, activations with a scale for
  each row. oneDNN adds the products in 32-bit integers.
- Attention multiplies integer-valued floats. Queries, keys and values have 8 bits and a scale for each row and head, so
  a score is an integer below 2^24 for heads of up to 1,040: float32 holds every partial sum of it exactly. Softmax
  weights are added as integers of 20 bits in float64, then rounded to 16 bits, so that the sum of their products with
  values stays below 2^24 for up to 133,000 rows.

What is left works on single numbers (exponentials, products with scales) or on one row of fixed length (norms).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from card.models.attention import SequencePass
from card.models.fused import FusedDecoder, FusedLayer, Linear, joined, mirrored_rms_norm
from card.models.kv_cache import KVLayout

if TYPE_CHECKING:
    from card.models.decoder_model import LoadedModel

_LEAST_SCALE = 1e-30  # of a row of zeros, whose integers are zeros, too
_LARGEST = 127.0
_ZERO_POINT = 128  # oneDNN's fast kernels take unsigned activations
_MAGIC = float(2**23 + _ZERO_POINT)  # a number added to this is rounded to an integer, which its last bits hold
_EXP_BITS, _WEIGHT_BITS = 20, 16  # of softmax weights, before and after they are divided by their sum
_PROBED_ROWS = (1, 2, 16, 33)


class Int8Linear(tuple[Tensor, Tensor, Tensor]):
    """Packed integer weights, their scales [out] and their zero points [out], all 0."""

    __slots__ = ()


class Int8Kernels:
    """The matrix products of a layer in integers; ``x`` and results are float32."""

    def __init__(self) -> None:
        self._product = torch.ops.onednn.qlinear_pointwise.default
        self._magic = torch.tensor(_MAGIC)

    def linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Return x W^T + b."""
        return self._times(*self._quantized(x), layer)

    def linear_add(self, x: Tensor, layer: Linear, residual: Tensor) -> Tensor:
        """Return residual + x W^T + b."""
        return self.linear(x, layer).add_(residual)

    def gated(self, x: Tensor, gate_up: tuple[Linear, ...]) -> Tensor:
        """Return silu(gate(x)) * up(x)."""
        gate, up = gate_up
        numbers, scales = self._quantized(x)
        return nn.functional.silu(self._times(numbers, scales, gate), inplace=True).mul_(
            self._times(numbers, scales, up)
        )

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x as unsigned bytes [T, in] around the zero point, and the scale of each row [T, 1]."""
        scales = x.abs().amax(1, keepdim=True).mul_(1 / _LARGEST).clamp_min_(_LEAST_SCALE)
        rounded = torch.addcmul(self._magic, x, scales.reciprocal())
        return rounded.view(torch.uint8).view(*x.shape, 4)[..., 0].contiguous(), scales

    def _times(self, numbers: Tensor, scales: Tensor, layer: Linear) -> Tensor:
        (weight, weight_scales, zero_points), bias = layer
        out: Tensor = self._product(
            numbers, 1.0, _ZERO_POINT, weight, weight_scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
        ).mul_(scales)
        return out if bias is None else out.add_(bias)


def quantize_weight(weight: Tensor) -> Int8Linear:
    """Return a weight [out, in] as packed integers with a scale for each output channel."""
    scales = weight.float().abs().amax(1).div_(_LARGEST).clamp_min_(_LEAST_SCALE)
    numbers = torch.round(weight.float() / scales[:, None]).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(numbers, None)
    return Int8Linear((packed, scales, torch.zeros(len(scales), dtype=torch.int64)))


class Int8Decoder(FusedDecoder):
    """A decoder walked directly, in integers. Its KV rows hold integers and, behind them, their scale."""

    def __init__(self, model: LoadedModel, max_model_len: int) -> None:
        super().__init__(model, max_model_len)
        of = self.layout
        self.layout = KVLayout(of.num_layers, of.num_kv_heads, self._head_size + 1, torch.float32, of.device)
        self.needs_bias = True  # of a chain, too: every row's sum has the same columns then

    def _make_kernels(self, model: LoadedModel) -> None:
        self._is_packed, self._is_cpu, self._dtype = True, True, torch.float32
        self._kernels = Int8Kernels()

    def _linear(self, linears: Sequence[nn.Linear]) -> Linear:
        weight, bias = joined(linears)
        return quantize_weight(weight), None if bias is None else bias.float()

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return super()._norm_weight(weight.float())

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return mirrored_rms_norm(x, weight, self._eps)

    def _norm_heads(self, rotated: Tensor, layer: FusedLayer) -> None:
        assert layer.head_norm is not None
        ones = torch.ones(2 * self._head_size)
        flat = mirrored_rms_norm(rotated.reshape(-1, self._head_size), ones, self._eps)
        torch.mul(flat.view(rotated.shape), layer.head_norm, out=rotated)

    def _attend(
        self, qkv: Tensor, index: int, layer: FusedLayer, steps: Sequence[SequencePass], outs: Sequence[Tensor]
    ) -> None:
        size, num_heads, num_kv_heads = self._head_size, self._num_heads, self._num_kv_heads
        heads = qkv.view(len(qkv), -1, size)  # queries, keys, values
        scales = heads.abs().amax(-1, keepdim=True).mul_(1 / _LARGEST).clamp_min_(_LEAST_SCALE)
        numbers = torch.round(heads * scales.reciprocal())
        for step, out in zip(steps, outs, strict=True):
            rows = slice(step.offset, step.offset + step.num_new)
            new = step.new_rows[index]  # [2, Hkv, T, D + 1]
            for part, values in ((new[..., :size], numbers), (new[..., size:], scales)):
                own = values[rows, num_heads:].view(step.num_new, 2, num_kv_heads, -1)
                part.copy_(own.permute(1, 2, 0, 3))
            query = numbers[rows, :num_heads].view(step.num_new, num_kv_heads, self.group, size).transpose(0, 1)
            query_scales = scales[rows, :num_heads].view(step.num_new, num_kv_heads, self.group, 1).transpose(0, 1)
            attended = attend_in_integers(step, index, query, query_scales * self._scale, layer.window)
            out.copy_(attended.transpose(0, 1))


def attend_in_integers(
    step: SequencePass, layer: int, query: Tensor, query_scales: Tensor, window: int | None
) -> Tensor:
    """Return the attention of the new rows over all rows that they see, whose keys and values must be written.

    Args:
        query: [Hkv, T, G, D] integers; G query heads share a KV head.
        query_scales: [Hkv, T, G, 1], the factor on the scores included.
    Returns: [Hkv, T, G, D] float32.
    """
    keys, values = step.keys[layer][0], step.values[layer][0]  # [Hkv, S, D + 1]
    num_kv_heads, num_new, group, size = query.shape
    rows = num_new * group
    scores = torch.bmm(query.reshape(num_kv_heads, rows, size), keys[..., :size].transpose(1, 2))
    scores.mul_(query_scales.reshape(num_kv_heads, rows, 1)).mul_(keys[..., size][:, None])
    bias = step.biases[window]
    if bias is not None:
        scores.view(num_kv_heads, num_new, group, -1).add_(bias)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_().mul_(2.0**_EXP_BITS).round_()
    value_scales = values[..., size][:, None]  # [Hkv, 1, S]
    largest = (scores.sign() * value_scales).amax(-1, keepdim=True)  # of the rows that count
    factors = (2.0**_WEIGHT_BITS / scores.sum(-1, keepdim=True, dtype=torch.float64)).to(torch.float32).div_(largest)
    weights = scores.mul_(factors).mul_(value_scales).round_()
    out = torch.bmm(weights, values[..., :size]).mul_(largest.mul_(2.0**-_WEIGHT_BITS))
    return out.view(num_kv_heads, num_new, group, size)


@functools.cache
def why_not_int8() -> str | None:
    """Return why integer passes cannot be trusted to be exact and fast on this machine; None if they can."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return "this build of torch has no integer linear layers"
    if not torch.cpu._is_vnni_supported():
        return "this processor has no instructions for products of bytes (VNNI)"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((96, 256), generator=generator)
    x = torch.randn((max(_PROBED_ROWS), 256), generator=generator)
    kernels, layer, threads_before = Int8Kernels(), (quantize_weight(weight), None), torch.get_num_threads()
    numbers, scales = kernels._quantized(x)
    integers = torch.round(weight / layer[0][1][:, None]).to(torch.int64)
    sums = (numbers.to(torch.int64) - _ZERO_POINT) @ integers.T
    expected = (sums.to(torch.float32) * layer[0][1]).mul_(scales)
    try:
        for num_threads in {1, threads_before}:
            torch.set_num_threads(num_threads)
            for num_rows in _PROBED_ROWS:
                if not torch.equal(kernels.linear(x[:num_rows], layer), expected[:num_rows]):
                    return f"integer products of {num_rows} rows on {num_threads} threads are not exact here"
    finally:
        torch.set_num_threads(threads_before)
    return None
