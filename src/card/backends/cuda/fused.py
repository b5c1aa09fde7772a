"""Decoders of known architectures walked directly by torch: the model's own weights, few operations, no modules."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from card.backends.cuda.joined import Linear, joined, linear_of, linears_of, share
from card.backends.transformers.arrays import TorchLayout, as_array, as_tensor
from card.backends.transformers.attention import Scoring, SequencePass, attend, sequence_pass
from card.backends.transformers.walking import architecture_of, rotary_table, why_not_walked
from card.kernels.number_types import dtype_name
from card.models.architectures import Architecture
from card.models.draft_vocab import kept_ids
from card.models.features import FINAL, PassStates
from card.models.images import ImageRows
from card.models.layer_kinds import layer_windows
from card.models.layer_shape import head_dim
from card.models.parts import NormPlace
from card.models.protocol import Extension
from card.models.rows.kv_cache import SequenceRows
from card.models.rows.kv_layout import KVShape
from card.models.rows.row_tree import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPass(SequencePass):
    """A pass at fixed addresses: the rows for the new keys and values are a tensor on the device."""

    kv: Tensor  # [L, 2, Hkv, rows, D]
    row_idx: Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights of one decoder layer, ready for the kernels."""

    norms: dict[NormPlace, Tensor]  # outside the heads: [C]
    qkv: Linear  # H + 2 Hkv heads
    head_norm: Tensor | None  # [H + Hkv, D]: weights of the norms on queries and keys, of each head or all at once
    output: Linear
    gate_up: Linear  # one product of both
    down: Linear
    window: int | None
    rotary: str | None  # its kind of angles


class TensorStates:
    """Hidden states of a pass on its device."""

    def __init__(self, layers: Set[int]) -> None:
        """Keep those of these layers, as in `PassStates`."""
        self._layers = layers
        self.kept: dict[int, Tensor] = {}

    def take(self, layer: int, hidden: Tensor) -> None:
        """Keep the states after a layer if they are wanted; the tensor is never overwritten."""
        if layer in self._layers:
            self.kept[layer] = hidden


def why_not_fused(model: PreTrainedModel) -> str | None:
    """Return why the weights of a model cannot be walked by torch, or None if they can."""
    if (reason := why_not_walked(model)) is not None:
        return reason
    architecture = architecture_of(model)
    if architecture is not None and architecture.norms_values:
        return "it norms its values"
    if architecture is not None and (architecture.turns_first or architecture.query_growth is not None):
        return "its heads turn before they are normed, or its queries grow in long texts"
    return "it has experts" if architecture is not None and architecture.expert_parts else None


class FusedDecoder:
    """Runs decoders of the architectures that have an entry; `why_not_fused` must have returned None."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        inner: Any = model.model
        config, architecture = model.config, architecture_of(model)
        assert architecture is not None
        self._head_size = head_size = head_dim(config)
        self.embedding: Tensor = inner.embed_tokens.weight.detach()
        self._dtype = self.embedding.dtype
        self._has_silu = architecture.gate_activation(config) == "silu"
        self._eps, self._norm_offset = float(getattr(config, architecture.norm_eps)), architecture.norm_offset
        self._centres, self._is_parallel = architecture.centres, architecture.is_parallel
        self._has_wide_norms, self._turns_neighbours = architecture.has_wide_norms, architecture.turns_neighbours
        scale = architecture.scale("attention", config, head_size**-0.5)
        self._scoring = Scoring(scale, architecture.cap("attention", config))
        self._embedding_scale = architecture.embedding_scale(config, np.dtype(dtype_name(self._dtype)))
        self._residual_scale = architecture.scale("residual", config)
        self._logits_scale, self._logits_cap = architecture.scale("logits", config), architecture.cap("logits", config)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self.windows = layer_windows(config, max_model_len)
        kinds = architecture.rotary_kinds(config)
        with torch.inference_mode():
            turning = [kind for kind in dict.fromkeys(kinds) if kind is not None]
            self._rotations = {kind: self._rotation(model, max_model_len, kind) for kind in turning}
            layers = inner.layers[: config.num_hidden_layers]
            self._layers: list[FusedLayer] = []
            for layer, window, kind in zip(layers, self.windows, kinds, strict=True):
                self._layers.append(self._layer(model, layer, window, kind, architecture))
            self._norm = self._with_offset(inner.norm.weight)
            head, ids = cast(nn.Linear, model.lm_head), kept_ids(model)
            self._head_ids = None if ids is None else as_tensor(ids, model.device)
            if self._head_ids is not None:
                biases = None if head.bias is None else head.bias.detach()[self._head_ids]
                head = linear_of(head.weight.detach()[self._head_ids], biases)
            self._head = self._linear([head])
        self.group = self._num_heads // self._num_kv_heads
        self.vocab_size = int(cast(nn.Linear, model.lm_head).out_features)
        shapes = (KVShape(self._num_kv_heads, head_size),) * len(self._layers)
        self.layout = TorchLayout(shapes, self._dtype, self.embedding.device)

    def _rotation(self, model: PreTrainedModel, max_model_len: int, kind: str) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, 1, channels] of a kind of angles; the sines with their signs."""
        cos, sin = rotary_table(model, max_model_len, self._dtype, kind)
        half = sin.shape[1] // 2
        sign = torch.ones(2 * half, dtype=sin.dtype, device=sin.device)
        sign[:half] = -1
        sin = sin * sign
        if self._turns_neighbours:
            cos, sin = (table.view(-1, 2, half).transpose(1, 2).flatten(1) for table in (cos, sin))
        return cos[:, None].contiguous(), sin[:, None].contiguous()

    def _linear(self, linears: Sequence[nn.Linear]) -> Linear:
        weight, bias = joined(linears)
        if len(linears) > 1:
            share(linears, weight)
        return weight, bias

    def _with_offset(self, weight: Tensor) -> Tensor:
        """Return the factors of a norm; in half precision the sum would lose most of the weight."""
        if not self._norm_offset:
            return weight.detach()
        return self._norm_offset + weight.detach().to(torch.promote_types(weight.dtype, torch.float32))

    def _layer(
        self, model: PreTrainedModel, layer: Any, window: int | None, rotary: str | None, architecture: Architecture
    ) -> FusedLayer:
        query, key, value, out, gate, up, down = linears_of(layer, architecture, model.config)
        norms = {place: layer.get_submodule(part.name).weight for place, part in architecture.norms.items()}
        head_norm = None
        if "query" in norms:
            of_heads = [(norms.pop("query"), self._num_heads), (norms.pop("key"), self._num_kv_heads)]
            weights = [self._with_offset(weight).view(-1, self._head_size) for weight, _ in of_heads]
            head_norm = torch.cat([weight.expand(num, -1) for weight, (_, num) in zip(weights, of_heads, strict=True)])
        return FusedLayer(
            norms={place: self._with_offset(weight) for place, weight in norms.items()},
            qkv=self._linear([query, key, value]),
            head_norm=head_norm,
            output=self._linear([out]),
            gate_up=self._linear([gate, up]),
            down=self._linear([down]),
            window=window,
            rotary=rotary,
        )

    def _norm_rows(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return rows after a norm; None returns them unchanged."""
        if weight is None:
            return x
        if self._centres:
            return functional.layer_norm(x.to(weight.dtype), weight.shape, weight, None, self._eps).to(x.dtype)
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, self._eps).to(x.dtype)

    def step(self, sequence: SequenceRows, extension: Extension, offset: int) -> SequencePass:
        """Prepare the pass of an extension's rows, the newest ones; ``offset`` is that of their first among all."""
        return sequence_pass(
            sequence, extension, offset, group=self.group, windows=self.windows, needs_bias=not self._scoring.is_plain
        )

    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        steps: Sequence[SequencePass],
        logits_rows: IntArray | slice,
        states: PassStates | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Return logits [rows, V] of the chosen rows of the pass; token_ids and positions are [sum T].

        ``states`` receives the hidden states that a consumer wants.
        """
        assert images is None, "images are read on a CPU"
        device = self.embedding.device
        tensor_states = None if states is None else TensorStates(states.layers)
        rows = logits_rows if isinstance(logits_rows, slice) else as_tensor(logits_rows, device)
        logits = self.run(as_tensor(token_ids, device), as_tensor(positions, device), steps, rows, tensor_states)
        if states is not None and tensor_states is not None:
            for layer, hidden in tensor_states.kept.items():
                states.take(layer, as_array(hidden))
        return logits

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: Sequence[SequencePass],
        logits_rows: Tensor | slice,
        states: TensorStates | None = None,
    ) -> Tensor:
        """Run a pass as `forward` with tensors on the device, which a recorded pass reads and writes."""
        rotations = {
            kind: (cos.index_select(0, positions), sin.index_select(0, positions))
            for kind, (cos, sin) in self._rotations.items()
        }
        hidden = functional.embedding(token_ids, self.embedding).to(self._dtype)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        num_heads, num_kv_heads, head_size = self._num_heads, self._num_kv_heads, self._head_size
        attended = hidden.new_empty((len(token_ids), num_heads * head_size))
        outs = [  # reused by every layer: the next layer writes after this one has read
            attended.narrow(0, step.offset, step.num_new).view(step.num_new, num_kv_heads, -1, head_size)
            for step in steps
        ]
        if states:
            states.take(0, hidden)
        for index, layer in enumerate(self._layers):
            read = self._norm_rows(hidden, layer.norms.get("attention_in"))
            qkv = functional.linear(read, *layer.qkv)
            self._attention(qkv, index, layer, rotations, steps, outs)
            hidden = self._add(attended, layer.output, layer.norms.get("attention_out"), hidden)
            if not self._is_parallel:
                read = self._norm_rows(hidden, layer.norms.get("mlp_in"))
            gated = self._gated(read, layer.gate_up)
            hidden = self._add(gated, layer.down, layer.norms.get("mlp_out"), hidden)
            if states:
                states.take(index + 1, hidden)
        if states:
            states.take(FINAL, self._norm_rows(hidden, self._norm))
        hidden = hidden[logits_rows]
        if not len(hidden):
            return hidden.new_empty((0, self.vocab_size))
        logits = functional.linear(self._norm_rows(hidden, self._norm), *self._head)
        if self._logits_scale != 1.0:
            logits = logits / self._logits_scale
        if self._logits_cap is not None:
            logits = torch.tanh(logits / self._logits_cap) * self._logits_cap
        if self._head_ids is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), float("-inf")).index_copy_(1, self._head_ids, logits)

    def _gated(self, x: Tensor, gate_up: Linear) -> Tensor:
        gate, up = functional.linear(x, *gate_up).chunk(2, -1)
        activated = functional.silu(gate) if self._has_silu else functional.gelu(gate, approximate="tanh")
        return activated.mul_(up)

    def _add(self, x: Tensor, layer: Linear, norm: Tensor | None, hidden: Tensor) -> Tensor:
        """Return the hidden states plus the output of a block."""
        if norm is not None or self._residual_scale != 1.0:
            added = self._norm_rows(functional.linear(x, *layer), norm)
            return torch.add(hidden, added, alpha=self._residual_scale)
        weight, bias = layer
        out = torch.addmm(hidden, x, weight.t())
        return out if bias is None else out.add_(bias)

    def _attention(
        self,
        qkv: Tensor,
        index: int,
        layer: FusedLayer,
        rotations: dict[str, tuple[Tensor, Tensor]],
        steps: Sequence[SequencePass],
        outs: Sequence[Tensor],
    ) -> None:
        """Write a layer's new keys and values, and its attention into ``outs``; qkv is [sum T, (H + 2 Hkv) D]."""
        width, size = qkv.shape[1], self._head_size
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        rotated = qkv.as_strided((qkv.shape[0], num_heads + num_kv_heads, size), (width, size, 1))  # queries and keys
        if layer.head_norm is not None:
            self._norm_heads(rotated, layer)
        if layer.rotary is not None:
            cos, sin = rotations[layer.rotary]
            turned = rotated[..., : cos.shape[-1]]
            if self._turns_neighbours:
                swapped = turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
            else:
                swapped = torch.roll(turned, cos.shape[-1] // 2, -1)
            turned.mul_(cos).addcmul_(swapped, sin)
        self._attend(qkv, index, layer, steps, outs)

    def _norm_heads(self, rotated: Tensor, layer: FusedLayer) -> None:
        """Apply the norms of queries and keys in place; rotated is [sum T, H + Hkv, D]."""
        assert layer.head_norm is not None
        heads = rotated.to(layer.head_norm.dtype)
        if self._has_wide_norms:
            parts = (heads[:, : self._num_heads], heads[:, self._num_heads :])
            normed = torch.cat([functional.rms_norm(part, part.shape[1:], None, self._eps) for part in parts], 1)
        else:
            normed = functional.rms_norm(heads, (self._head_size,), None, self._eps)
        torch.mul(normed, layer.head_norm, out=rotated)

    def _attend(
        self, qkv: Tensor, index: int, layer: FusedLayer, steps: Sequence[SequencePass], outs: Sequence[Tensor]
    ) -> None:
        """Write keys and values, and the attention of rotated heads."""
        width, size = qkv.shape[1], self._head_size
        group, num_heads, num_kv_heads = self.group, self._num_heads, self._num_kv_heads
        for step, out in zip(steps, outs, strict=True):
            first, num_new = step.offset * width, step.num_new
            new = qkv.as_strided(
                (2, num_kv_heads, num_new, size), (num_kv_heads * size, size, width, 1), first + num_heads * size
            )
            if isinstance(step, StaticPass):
                step.kv[index].index_copy_(2, step.row_idx, new)
            else:
                step.new_rows[index].copy_(new)
            query = qkv.as_strided((num_kv_heads, num_new, group, size), (group * size, width, size, 1), first)
            out.copy_(attend(step, index, query, layer.window, self._scoring).transpose(0, 1))
