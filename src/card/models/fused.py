"""Decoders of known architectures walked directly: the model's own weights, few operations, no module overhead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.models.architectures import Architecture, all_architectures
from card.models.architectures.architecture import ACTIVATIONS, NormPlace, head_dim, rotary_size
from card.models.attention import Scoring, SequencePass, attend, sequence_pass
from card.models.block_layers import BlockLinear, has_blocks
from card.models.decoder_model import RotaryEmbedding, architecture_of, linears_of, release_pages
from card.models.draft_vocab import head_of, spread
from card.models.features import PassStates, select_rows
from card.models.generic import layer_windows
from card.models.kv_cache import KVLayout, SequenceRows
from card.models.layer_kinds import WITH_CHUNKS, layer_kinds
from card.models.linear_kernels import PACKED_BATCH, Linear, PackedKernels, PlainKernels, can_pack, joined, share
from card.models.long_rope import switch_len
from card.models.protocol import Extension
from card.models.vision import ImageRows

if TYPE_CHECKING:
    from card.models.decoder_model import LoadedModel

EXACT_ROWS, FINE_ROWS = 17, 64  # rows of a packed pass up to which all sizes have kernels, and those of every 8th size
FINE_STEP, COARSE_STEP = 8, 32  # beyond: oneDNN makes the kernels of a size at its first pass, in up to 20 ms
MAX_MIRRORED_ROWS = 64  # up to here `mirrored_rms_norm` is faster on CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPass(SequencePass):
    """A pass at fixed addresses: only the device knows the rows that the new keys and values go to."""

    kv: Tensor  # [L, 2, Hkv, rows, D]
    row_idx: Tensor  # [T] int64


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The weights of one decoder layer, ready for the kernels."""

    norms: dict[NormPlace, Tensor]  # outside the heads: [C], or [2 C] doubled for `mirrored_rms_norm`
    qkv: Linear  # H + 2 Hkv heads
    head_norm: Tensor | None  # [H + Hkv, D]: weights of the norms on queries and keys, of each head or all at once
    output: Linear
    gate_up: tuple[Linear, ...]  # one product of both, or gate and up
    down: Linear
    window: int | None
    rotary: str | None  # its kind of angles


def reason_not_fusable(model: LoadedModel, max_model_len: int) -> str | None:
    """Return why the model cannot be walked directly, or None if it can."""
    architecture = architecture_of(model)
    if architecture is None:
        return f"{type(model).__name__} is none of {', '.join(one.model_class for one in all_architectures())}"
    config = model.config
    inner: Any = model.model
    if not WITH_CHUNKS.isdisjoint(layer_kinds(config)):
        return "its attention is chunked"
    if (activation := getattr(config, architecture.activation)) not in ACTIVATIONS:
        return f"its activation is {activation}, not {' or '.join(ACTIVATIONS)}"
    if switch_len(model, max_model_len) is not None:
        return "its rotary embedding (longrope) changes with the length of the text"
    kinds = {kind for kind in architecture.rotary_kinds(config) if kind is not None}
    sizes = {kind: rotary_table(model, 1, torch.float32, kind)[0].shape[-1] for kind in kinds}
    if any(size != rotary_size(config, kind) for kind, size in sizes.items()) or (
        not architecture.turns_parts and set(sizes.values()) - {head_dim(config)}
    ):
        return "its rotary embedding turns only a part of each head"
    tensors = [p for p in model.parameters() if p.is_floating_point()]
    mixed = len({(p.device, p.dtype) for p in tensors}) > 1 and not has_blocks(model)
    if mixed or tensors[0].device.type == "meta":
        return "its weights are spread over several devices or dtypes"
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            return "its modules carry device hooks"
    for layer in inner.layers:
        for part in architecture.linears:
            if type(layer.get_submodule(part.name)) not in (nn.Linear, BlockLinear):
                kind = type(layer.get_submodule(part.name))
                return f"its {part.name} is a {kind.__name__}, not a plain linear layer"
    return None


def rotary_table(model: LoadedModel, num_positions: int, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin [num_positions, channels that turn] for one of a model's `rotary_parameters`.

    They are those of its own rotary module, for halves of a head.
    """
    inner: Any = model.model
    architecture = architecture_of(model)
    assert architecture is not None
    like = inner.norm.weight[None, None].to(dtype)
    positions = torch.arange(num_positions, device=like.device)[None]
    rotate = RotaryEmbedding(model.config) if architecture.turns_neighbours else inner.rotary_emb
    cos, sin = rotate(like, positions, *([kind] if kind else []))
    return cos[0].to(dtype), sin[0].to(dtype)


def mirrored_rms_norm(x: Tensor, doubled_weight: Tensor, eps: float) -> Tensor:
    """RMS norm as a layer norm of (x, -x), whose mean is 0 and variance the mean square: one kernel on CPU, not six."""
    both = torch.cat((x, -x), 1)
    return functional.layer_norm(both, doubled_weight.shape, doubled_weight, None, eps)[:, : x.shape[1]]


def _angles(table: Tensor, positions: Tensor, images: ImageRows | None) -> Tensor:
    """Return rows of a table [positions, 1, channels] for positions [T], or [3, T] with an axis for each channel."""
    if positions.dim() == 1:
        return table.index_select(0, positions)
    assert images is not None and images.axes is not None
    of_axes = table[positions]
    return of_axes.gather(0, images.axes.expand(1, *of_axes.shape[1:]))[0]


class FusedDecoder:
    """Runs decoders of the architectures that have an entry; `reason_not_fusable` must have returned None."""

    def __init__(self, model: LoadedModel, max_model_len: int) -> None:
        inner: Any = model.model
        config, architecture = model.config, architecture_of(model)
        assert architecture is not None
        self._head_size = head_size = head_dim(config)
        self.embedding: Tensor = inner.embed_tokens.weight.detach()
        self._make_kernels(model, getattr(config, architecture.activation))
        self._eps, self._norm_offset = float(getattr(config, architecture.norm_eps)), architecture.norm_offset
        self._centres, self._is_parallel = architecture.centres, architecture.is_parallel
        self._has_wide_norms, self._turns_neighbours = architecture.has_wide_norms, architecture.turns_neighbours
        self._scoring = Scoring(architecture.scale("attention", config), architecture.cap("attention", config))
        self._embedding_scale = architecture.embedding_scale(config, self._dtype)
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
                release_pages(model)
            self._norm = self._norm_weight(inner.norm.weight)
            head, self._head_ids = head_of(model)
            self._head = self._linear([cast(nn.Linear, head)])
            release_pages(model)
        self.group = self._num_heads // self._num_kv_heads
        self.vocab_size = int(cast(nn.Linear, model.lm_head).out_features)
        self.layout = KVLayout(len(self._layers), self._num_kv_heads, head_size, self._dtype, self.embedding.device)

    def _rotation(self, model: LoadedModel, max_model_len: int, kind: str) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [positions, 1, channels] of a kind of angles; the sines with their signs."""
        cos, sin = rotary_table(model, max_model_len, self._dtype, kind)
        half = sin.shape[1] // 2
        sign = torch.ones(2 * half, dtype=sin.dtype, device=sin.device)
        sign[:half] = -1
        sin = sin * sign
        if self._turns_neighbours:
            cos, sin = (table.view(-1, 2, half).transpose(1, 2).flatten(1) for table in (cos, sin))
        return cos[:, None].contiguous(), sin[:, None].contiguous()

    def _make_kernels(self, model: LoadedModel, activation: str) -> None:
        """Choose who multiplies, and what the decoder computes in."""
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._dtype = self.embedding.dtype
        self._is_packed = can_pack(self.embedding, num_bytes)
        kernels = PackedKernels if self._is_packed else PlainKernels
        self._kernels: PackedKernels | PlainKernels = kernels(activation)
        self._is_cpu = self.embedding.device.type == "cpu"

    def _linear(self, linears: Sequence[nn.Linear]) -> Linear:
        weight, bias = joined(linears)
        if self._is_packed:
            return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_BATCH), bias
        if len(linears) > 1:
            share(linears, weight)
        return weight, bias

    def _with_offset(self, weight: Tensor) -> Tensor:
        """Return what a norm multiplies by; in half precision the sum would lose most of the weight."""
        if not self._norm_offset:
            return weight.detach()
        return self._norm_offset + weight.detach().to(torch.promote_types(weight.dtype, torch.float32))

    def _norm_weight(self, weight: Tensor) -> Tensor:
        weight = self._with_offset(weight)
        return torch.cat((weight, weight)) if self._is_cpu and not self._centres else weight

    def _layer(
        self, model: LoadedModel, layer: Any, window: int | None, rotary: str | None, architecture: Architecture
    ) -> FusedLayer:
        linears = linears_of(layer, architecture, model.config)
        norms = {place: layer.get_submodule(part.name).weight for place, part in architecture.norms.items()}
        head_norm = None
        if "query" in norms:
            of_heads = [(norms.pop("query"), self._num_heads), (norms.pop("key"), self._num_kv_heads)]
            weights = [self._with_offset(weight).view(-1, self._head_size) for weight, _ in of_heads]
            head_norm = torch.cat([weight.expand(of[1], -1) for weight, of in zip(weights, of_heads, strict=True)])
        gate_up = [linears.gate, linears.up]
        return FusedLayer(
            norms={place: self._norm_weight(weight) for place, weight in norms.items()},
            qkv=self._linear([linears.query, linears.key, linears.value]),
            head_norm=head_norm,
            output=self._linear([linears.out]),
            gate_up=tuple(self._linear([m]) for m in gate_up) if self._is_packed else (self._linear(gate_up),),
            down=self._linear([linears.down]),
            window=window,
            rotary=rotary,
        )

    def _norm_rows(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return rows after a norm; None leaves them as they are."""
        if weight is None:
            return x
        if self._centres:
            return functional.layer_norm(x.to(weight.dtype), weight.shape, weight, None, self._eps).to(x.dtype)
        if not self._is_cpu:
            return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, self._eps).to(x.dtype)
        if x.shape[0] <= MAX_MIRRORED_ROWS:
            return mirrored_rms_norm(x, weight, self._eps)
        return functional.rms_norm(x.to(weight.dtype), x.shape[1:], weight[: x.shape[1]], self._eps).to(x.dtype)

    def _num_pads(self, num_rows: int) -> int:
        """Return how many rows to put behind so many: prompts have every length, and kernels are made for each size."""
        if not self._is_packed or num_rows <= EXACT_ROWS:
            return 0
        return -num_rows % (FINE_STEP if num_rows <= FINE_ROWS else COARSE_STEP)

    def step(self, sequence: SequenceRows, extension: Extension, offset: int) -> SequencePass:
        """Prepare the pass of an extension's rows, the newest ones; ``offset`` is that of their first among all."""
        return sequence_pass(
            sequence, extension, offset, group=self.group, windows=self.windows, needs_bias=not self._scoring.is_plain
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: Sequence[SequencePass],
        logits_rows: Tensor | slice,
        states: PassStates | None = None,
        images: ImageRows | None = None,
    ) -> Tensor:
        """Return logits [rows, V] of the chosen rows of the pass; token_ids are [sum T] int64.

        Args:
            positions: [sum T] int64; [3, sum T] with images whose ``axes`` say which of them turns a channel.
            states: takes the hidden states that somebody wishes for.
            images: what stands in places of images; None: nothing.
        """
        kernels, num_rows = self._kernels, len(token_ids)
        if num_pads := self._num_pads(num_rows):  # rows that see nothing and that nobody looks at
            token_ids, positions = functional.pad(token_ids, (0, num_pads)), functional.pad(positions, (0, num_pads))
        rotations = {
            kind: (_angles(cos, positions, images), _angles(sin, positions, images))
            for kind, (cos, sin) in self._rotations.items()
        }
        hidden = functional.embedding(token_ids, self.embedding).to(self._dtype)
        if images is not None and len(images.rows):
            hidden[images.rows] = images.features.to(self._dtype)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        num_heads, num_kv_heads, head_size = self._num_heads, self._num_kv_heads, self._head_size
        attended = hidden.new_empty((num_rows + num_pads, num_heads * head_size))
        if num_pads:
            attended[num_rows:] = 0
        outs = [  # reused by every layer: the next layer writes after this one has read
            attended.narrow(0, step.offset, step.num_new).view(step.num_new, num_kv_heads, -1, head_size)
            for step in steps
        ]
        if states:
            states.take(0, hidden[:num_rows])
        for index, layer in enumerate(self._layers):
            read = self._norm_rows(hidden, layer.norms.get("attention_in"))
            qkv = kernels.linear(read, layer.qkv)
            self._attention(qkv, index, layer, rotations, steps, outs)
            hidden = self._add(attended, layer.output, layer.norms.get("attention_out"), hidden)
            if not self._is_parallel:
                read = self._norm_rows(hidden, layer.norms.get("mlp_in"))
            gated = kernels.gated(read, layer.gate_up)
            hidden = self._add(gated, layer.down, layer.norms.get("mlp_out"), hidden)
            if states:
                states.take(index + 1, hidden[:num_rows])
        if states:
            states.take_final(hidden[:num_rows], lambda chosen: self._norm_rows(chosen, self._norm))
        hidden = select_rows(hidden[:num_rows], logits_rows)
        if not len(hidden):
            return hidden.new_empty((0, self.vocab_size))
        logits = kernels.linear(self._norm_rows(hidden, self._norm), self._head)
        if self._logits_scale != 1.0:
            logits = logits / self._logits_scale
        if self._logits_cap is not None:
            logits = torch.tanh(logits / self._logits_cap) * self._logits_cap
        return spread(logits, self._head_ids, self.vocab_size)

    def _add(self, x: Tensor, layer: Linear, norm: Tensor | None, hidden: Tensor) -> Tensor:
        """Return the hidden states with what a block adds to them."""
        if norm is not None:
            return torch.add(hidden, self._norm_rows(self._kernels.linear(x, layer), norm), alpha=self._residual_scale)
        if self._residual_scale == 1.0:
            return self._kernels.linear_add(x, layer, hidden)
        return torch.add(hidden, self._kernels.linear(x, layer), alpha=self._residual_scale)

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
        """Write keys and values, and the attention of what is rotated already."""
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
