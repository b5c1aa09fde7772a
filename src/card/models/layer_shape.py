"""The shape of a layer: its heads, its width, its experts, and what it has in the place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Mixer = Literal["attention", "short_conv", "delta_rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer: MLPs of which each row takes some, by the softmax of a router's scores."""

    count: int
    chosen: int  # by each row
    width: int  # of each
    is_normed: bool  # the weights of those that a row chooses are over their sum
    has_sigmoids: bool = False  # weights are sigmoids of the scores, not their softmax
    sum_offset: float = 0.0  # what is added to the sum of such weights
    has_biases: bool = False  # something is added to sigmoids or to the softmax for the choice alone
    scale: float = 1.0  # what weights are times
    shared_width: int = 0  # of one more expert, which all rows take; 0: there is none
    has_shared_gate: bool = False  # and rows weigh it by the sigmoid of a score


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeads:
    """The heads of a layer of the gated delta rule."""

    num_keys: int
    num_values: int  # heads; several may share a key
    key_size: int
    value_size: int
    is_tiled: bool = False  # those that share a key are num_keys apart, not neighbours

    @property
    def num_inputs(self) -> int:
        """Channels that the convolution takes in."""
        return 2 * self.num_keys * self.key_size + self.num_values * self.value_size

    @property
    def state_size(self) -> int:
        """Numbers of the states of a text."""
        return self.num_values * self.key_size * self.value_size

    def ungrouped(self, sizes: Sequence[int]) -> list[IntArray]:
        """Return which rows of a weight make up each of its parts, if it has some of each part for each key.

        Args:
            sizes: rows of each part for a key.
        """
        rows = np.arange(self.num_keys * sum(sizes)).reshape(self.num_keys, -1)
        return [part.ravel() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]

    @property
    def joined_sizes(self) -> tuple[int, int, int, int]:
        """Rows of query, key, value and gate for each key, of a weight that has all of them."""
        of_values = self.num_values // self.num_keys * self.value_size
        return self.key_size, self.key_size, of_values, of_values


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer."""

    num_heads: int  # of queries
    num_kv_heads: int
    head_size: int
    mlp_width: int
    mixer: Mixer = "attention"  # what its rows learn of each other by
    num_taps: int = 0  # of a convolution: rows that one sums up, itself included
    experts: Experts | None = None  # in the place of the MLP, or beside one whose width is above 0
    kv_source: int | None = None  # the layer whose keys and values it reads; None: it has its own
    has_values: bool = True  # False: values are made by the layer of the keys
    input_width: int = 0  # numbers that a token has for this layer alone; 0: none
    has_head_norms: bool = True  # where an entry has norms of heads that its models may lack
    has_gates: bool = False  # what each head of attention gives is times the sigmoid of a gate, stored with its query
    delta: DeltaHeads | None = None  # of the mixer delta_rule
    reads_normed: bool = False  # what attention reads was normed before the layer

    def state_size(self, hidden: int) -> int:
        """Return the fewest numbers that a layer without attention keeps of a text, with states of this size."""
        if self.delta is not None:
            return self.delta.state_size
        return 0 if self.mixer == "attention" else self.num_taps * hidden


def stated_shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer as a config states it, once for all layers or as a list of each one's."""
    heads, kv_heads, inner = (
        of_layer(stated, layer)
        for stated in (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    )
    return LayerShape(heads, kv_heads, head_dim(config, layer), inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRule:
    """The fields of a config that state the experts of its layers, and what it takes for granted."""

    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"  # by each row; of all layers, or of each
    width: str = "moe_intermediate_size"
    is_normed: str | bool = "norm_topk_prob"
    has_sigmoids: bool = False
    sum_offset: float = 0.0
    has_biases: str | bool = False
    scale: str | None = None
    shared: str | None = None  # how many experts all rows take, which are one of their widths together
    shared_width: str | None = None  # or the width of that one
    has_shared_gate: bool = False
    enabled: str | None = None  # 0 or False: no layer has experts
    first: str | None = None  # the first layer that has some
    last: str | None = None
    period: str | None = None  # layers with a number that this divides have some
    without: str | None = None  # layers that have none
    keeps_mlp: bool = False  # they stand beside the MLP

    def of_layer(self, shape: LayerShape, config: Any, layer: int) -> LayerShape:
        """Return the shape of a layer with its experts, if it has some."""
        if not self._are_in(config, layer):
            return shape
        width, shared_width = of_layer(getattr(config, self.width), layer), _stated(config, self.shared_width, 0)
        experts = Experts(
            count=getattr(config, self.count),
            chosen=of_layer(getattr(config, self.chosen), layer),
            width=width,
            is_normed=_truth(config, self.is_normed),
            has_sigmoids=self.has_sigmoids,
            sum_offset=self.sum_offset,
            has_biases=_truth(config, self.has_biases),
            scale=_stated(config, self.scale, 1.0),
            shared_width=width * _stated(config, self.shared, 0) + of_layer(shared_width, layer),
            has_shared_gate=self.has_shared_gate,
        )
        return replace(shape, mlp_width=shape.mlp_width if self.keeps_mlp else 0, experts=experts)

    def _are_in(self, config: Any, layer: int) -> bool:
        return bool(
            _stated(config, self.enabled, True) > 0
            and _stated(config, self.first, 0) <= layer <= _stated(config, self.last, layer)
            and (layer + 1) % _stated(config, self.period, 1) == 0
            and layer not in _stated(config, self.without, ())
        )

    @property
    def gguf_keys(self) -> dict[str, str]:
        """llama.cpp's keys of numbers of experts, by fields of the config."""
        keys = {
            self.count: "expert_count",
            self.chosen: "expert_used_count",
            self.width: "expert_feed_forward_length",
            self.shared: "expert_shared_count",
            self.shared_width: "expert_shared_feed_forward_length",
        }
        return {name: key for name, key in keys.items() if name not in (None, "intermediate_size")}


def _stated(config: Any, name: str | None, usual: Any) -> Any:
    return usual if name is None else getattr(config, name)


def _truth(config: Any, stated: str | bool) -> bool:
    return getattr(config, stated, True) if isinstance(stated, str) else stated


def of_layer(stated: Any, layer: int) -> Any:
    """Return what a field of a config says of a layer: it is stated once for all, or as a list."""
    return stated[layer] if isinstance(stated, list | tuple) else stated


def head_dim(config: Any, layer: int = 0) -> int:
    """Return D of a layer of a config, ours or transformers'."""
    stated = of_layer(getattr(config, "head_dim", None), layer)
    return int(stated or config.hidden_size // of_layer(config.num_attention_heads, layer))
