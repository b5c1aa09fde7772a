"""Replace the attention of transformers' models: their layers call ours, which reads and writes our KV caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from card.backends.transformers.arrays import TorchLayout
from card.backends.transformers.attention import Scoring, SequencePass, attend
from card.errors import ModelError
from card.models.rows.kv_layout import KVLayout, KVShape
from card.models.rows.row_tree import Window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "card_rows"  # name of `_attention` in transformers' attention interface
_OWN = "card_own_attention"  # attribute of a changed model: its configs, with their original attention
_REFUSED_ARGUMENTS = ("position_bias", "alibi")  # of attention calls: unsupported changes of scores


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads of one layer: their numbers, sizes, dtype and device."""

    num_query_heads: int
    num_kv_heads: int
    size: int  # of queries and keys
    value_size: int
    dtype: torch.dtype
    device: torch.device


class AttentionProbe:
    """Stands in for a pass and records how each layer calls attention."""

    def __init__(self) -> None:
        self.layers: dict[int, _Heads] = {}
        self.needs_bias = False  # the causal mask cannot be left to the attention kernel

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Record the heads of a layer, and return zeros [1, sum T, H, Dv]; queries [1, H, sum T, D]."""
        if layer in self.layers:
            raise ModelError(f"layer {layer} attends more than once in a pass, which has no place in the KV cache")
        self.layers[layer] = _Heads(query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)
        self.needs_bias |= not scoring.is_plain
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    def layout(self, attending: Sequence[int]) -> tuple[KVLayout, int]:
        """Return the layout of the cache, and the number of query heads per KV head.

        Layers with fewer or smaller heads are padded.
        """
        if sorted(self.layers) != list(attending):
            raise ModelError(
                f"it has {len(attending)} layers of attention, but {len(self.layers)} called transformers' attention"
                " interface"
            )
        layers = self.layers.values()
        kinds = {(heads.num_query_heads, heads.dtype, heads.device) for heads in layers}
        num_kv_heads = max(heads.num_kv_heads for heads in layers)
        if len(kinds) > 1 or any(num_kv_heads % heads.num_kv_heads for heads in layers):
            raise ModelError(
                "its layers differ in query heads or dtype, or in KV heads that are no multiples of each other"
            )
        ((num_query_heads, dtype, device),) = kinds
        size = max(max(heads.size, heads.value_size) for heads in layers)
        shapes = (KVShape(num_kv_heads, size),) * len(attending)
        return TorchLayout(shapes, dtype, device), num_query_heads // num_kv_heads


class AttentionPass:
    """One forward pass: writes new keys and values into the caches and attends over them."""

    def __init__(
        self,
        steps: Sequence[SequencePass],
        windows: Sequence[Window],
        layout: KVLayout,
        places: Mapping[int, int],
        scales: Mapping[int, Tensor],
    ) -> None:
        self.steps = steps
        self.windows = windows
        self._scales = scales  # [sum T] of queries, by layer
        self._layout = layout
        self._places = places  # by layer with attention: its place in the KV cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Write keys and values [1, Hkv, sum T, D] and attend over all rows; arguments and result as of a probe."""
        value_size, place = value.shape[3], self._places[layer]
        if scoring.scale is None:
            scoring = replace(scoring, scale=query.shape[3] ** -0.5)
        if (scales := self._scales.get(layer)) is not None:
            query = (query * scales[:, None]).to(query.dtype)
        num_kv_heads, size = self._layout.shape
        query, key, value = (_filled(one, size) for one in (query, key, value))
        num_heads = query.shape[1]
        if key.shape[1] < num_kv_heads:  # the same head once for each part of its query heads
            times = num_kv_heads // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        out = query.new_empty((1, query.shape[2], num_heads, value_size))
        for step in self.steps:
            first, last = step.offset, step.offset + step.num_new
            rows = step.new_rows[place]
            rows[0].copy_(key[0, :, first:last])
            rows[1].copy_(value[0, :, first:last])
            heads = query[0, :, first:last].reshape(num_kv_heads, -1, step.num_new, query.shape[3]).transpose(1, 2)
            attended = attend(step, place, heads, self.windows[layer], scoring)[..., :value_size]
            out[0, first:last].view(step.num_new, num_kv_heads, -1, value_size).copy_(attended.transpose(0, 1))
        return out


def _filled(heads: Tensor, size: int) -> Tensor:
    """Return heads [..., D] padded with zeros to ``size``, which changes neither scores nor sums."""
    return heads if heads.shape[-1] == size else nn.functional.pad(heads, (0, size - heads.shape[-1]))


class TakenAttention:
    """Switches a model between its own attention and ours. Several runners may share a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Record the model's own attention, on the model, for its next runner."""
        transformers.AttentionInterface.register(_NAME, _attention)
        self._own = _own_attention_of(model)

    def take_over(self) -> None:
        """Install our attention, which needs the argument ``card_pass``, in all layers."""
        for config, _ in self._own:
            config._attn_implementation_internal = _NAME

    def release(self) -> None:
        """Restore the model's own attention."""
        for config, implementation in self._own:
            config._attn_implementation_internal = implementation


def _own_attention_of(model: Any) -> list[tuple[Any, str]]:
    """Return each config of a model with its own attention, as recorded on the model."""
    if not hasattr(model, _OWN):
        used: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        before = [(one, one._attn_implementation) for one in used.values() if one._attn_implementation != _NAME]
        setattr(model, _OWN, before)
    implementations: list[tuple[Any, str]] = getattr(model, _OWN)
    return implementations


@contextlib.contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model has its own attention, even if a runner has installed ours."""
    implementations = _own_attention_of(model)
    now = [config._attn_implementation for config, _ in implementations]
    for config, implementation in implementations:
        config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        for (config, _), implementation in zip(implementations, now, strict=True):
            config._attn_implementation_internal = implementation


class OutsidePassError(ModelError):
    """A layer was called outside of our passes."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    card_pass: AttentionPass | AttentionProbe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Pass one layer's queries [1, H, sum T, D], keys and values [1, Hkv, sum T, D] to our pass: [1, sum T, H, D]."""
    if card_pass is None:
        raise OutsidePassError(
            f"{type(module).__name__} was called by other code than CARD, which this model was given to: call it"
            " through CARD only, or load the model once more for other uses"
        )
    if attention_mask is not None:  # transformers makes none for a registered attention
        raise ModelError(f"{type(module).__name__} attends with a mask that it makes itself, which is not built")
    for name in _REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} attends with {name}, which is not built")
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer < 0 or not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} is not causal attention with a layer number")
    return card_pass.attend(int(layer), query, key, value, Scoring(scaling, softcap, s_aux)), None
