"""Architectures of decoder-only models as data: the parts that all have, and one entry for each architecture.

The passes (`card.models.own.exact_decoder`, `card.backends.cuda.fused`) and the readers of files
(`card.models.own.decoder_model`, `card.models.files.gguf`) read it; none of them asks a model's weights or its name.
All have norms, a gated MLP, rotary embeddings, and a head that may be tied. An entry states what differs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import Dtype
from card.kernels.rotation import PROPORTIONAL
from card.models.decoder_config import ConfigFields, ConfigRule, DecoderConfig, fields_of
from card.models.gguf_map import GgufMap
from card.models.layer_shape import ExpertRule, LayerShape, Mixer, stated_shape
from card.models.parts import (
    LINEARS,
    PRE_NORMS,
    Biased,
    ExpertPlace,
    InputPlace,
    NormPlace,
    Part,
    Size,
    VectorPlace,
)

Scale = Literal["attention", "embedding", "residual", "logits"]
Cap = Literal["attention", "logits"]
TILED = "tiles_value_heads"  # a mark on configs: value heads that share a key are apart, as GGUF files have them
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # of the gate, as configs name them
_OF_MLP = frozenset(("inner", "gate_up"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An entry of the table. Fields of the config are named: each model has values of its own."""

    model_class: str  # transformers'
    model_type: str = ""  # its own, by which it is found
    config: ConfigRule = field(default_factory=ConfigRule)
    outer_type: str | None = None  # the ``model_type`` of multimodal models whose text model is one of these
    biases: Mapping[Biased, str | Literal[True]] = field(default_factory=dict)  # by a field of the config, or always
    scales: Mapping[Scale, str | Callable[[Any], float]] = field(default_factory=dict)
    """Factors: fields of the config, or functions of it. Logits are divided by theirs."""
    multiplies_logits: bool = False  # by their factor, instead
    caps: Mapping[Cap, str] = field(default_factory=dict)  # fields with bounds: x becomes cap * tanh(x / cap)
    linears: tuple[Part, ...] = LINEARS
    expert_parts: Mapping[ExpertPlace, Part] = field(default_factory=dict)  # in layers whose shape has experts
    file_names: Mapping[str, str] = field(default_factory=dict)  # patterns in files' names, and what they are here
    interleaves_experts: bool = False
    """Its folders hold weights of experts [in, out] whose columns are of gate and up in turn, or rows of MXFP4."""
    norms: Mapping[NormPlace, Part] = field(default_factory=lambda: PRE_NORMS)
    norms_values: bool = False  # each head of values is normed, without a weight
    layer_inputs: str | None = None  # the field with how many numbers a token has for each layer
    input_parts: Mapping[InputPlace, Part] = field(default_factory=dict)  # of layers with some
    filters: tuple[Part, ...] = ()  # weights [channels, 1, taps] of convolutions
    vectors: Mapping[VectorPlace, Part] = field(default_factory=dict)
    """Numbers that are no weight of a module, under names of their own; used in float32."""
    mixers: Mapping[str, Mixer] = field(default_factory=dict)
    """Mixers of layers without attention, by their kind in the config; a GGUF file gives these no KV heads."""
    last_norm: tuple[str, str] = ("norm", "output_norm")  # transformers' and llama.cpp's name of the model's last norm
    rotary: str = "rotary_emb"  # transformers' name of what computes the angles
    norm_offset: float = 0.0  # added to the weights of all norms, but for that of delta_out
    norm_eps: str = "rms_norm_eps"  # the field with what norms add to the mean square
    centres: bool = False  # norms subtract the mean of a row first
    is_parallel: bool = False  # attention and the MLP read the same, what the norm "attention_in" gives
    activation: str | None = "hidden_act"  # the field that names the gate's; None: it is silu
    clamps_gate: bool = False  # the gate and what it is times are bounded, as in gpt-oss
    has_windows: bool = False  # the config may give layers a sliding window
    shapes: Callable[[Any, int], LayerShape] = stated_shape  # of each layer, by its number, without experts
    experts: ExpertRule | None = None
    turns: Callable[[Any, int], bool] = lambda config, layer: True  # whether a layer with attention turns heads
    turns_neighbours: bool = False  # channels that turn together are neighbours, not halves of the head apart
    scales_bases: bool = False  # the config may have the base of its angles times a power of a factor (alpha)
    turns_first: bool = False  # heads turn before they are normed
    query_growth: str | None = None  # the setting of the angles by which queries grow in long texts
    gives_angles_once: bool = False  # transformers' module gives each angle for one of the channels that turn by it
    turns_parts: bool = False  # the config may leave the last channels of each head as they are
    gguf: GgufMap = field(default_factory=GgufMap)
    unbuilt: Mapping[str, str] = field(default_factory=dict)  # fields that must be null or false, and what they ask for
    why_not: Callable[[Any], str | None] = lambda config: None  # why a config asks for more than is built here

    @property
    def config_fields(self) -> ConfigFields:
        """The fields of its configs."""
        return fields_of(self.model_type, self.config.defaults)

    def make_config(self, **stated: Any) -> DecoderConfig:
        """Return a config from what is stated. Raises: as `DecoderConfig` does."""
        return DecoderConfig(self.model_type, self.config, **stated)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that layers have; those of experts once for all of them."""
        others = (self.expert_parts, self.norms, self.input_parts, self.vectors)
        return (*self.linears, *(part for named in others for part in named.values()), *self.filters)

    def places_of(self, shape: LayerShape) -> tuple[Part, ...]:
        """Return the linear layers that a layer with this mixer has a place for, but for those of its experts."""
        linears = (part for part in self.linears if part.mixer in (None, shape.mixer))
        return tuple(part for part in linears if shape.mlp_width or not _OF_MLP.intersection(part.shape))

    @property
    def gguf_experts(self) -> dict[str, str]:
        """llama.cpp's keys of numbers of experts, by fields of the config."""
        return {} if self.experts is None else self.experts.gguf_keys

    @property
    def gguf_numbers(self) -> dict[str, str]:
        """llama.cpp's keys of whole numbers that its files state, by fields of the config."""
        first = None if self.experts is None else self.experts.first
        return {**self.gguf.sizes, **({} if first is None else {first: "leading_dense_block_count"})}

    @property
    def in_files(self) -> "Architecture":
        """The architecture in terms of its GGUF files, for models whose blocks stay as they are."""
        linears, experts = self.gguf.linears or self.linears, self.gguf.expert_parts or self.expert_parts
        return replace(
            self, linears=linears, expert_parts=experts, gguf=replace(self.gguf, linears=None, expert_parts=None)
        )

    def as_stored(self, names: Iterable[str]) -> "Architecture":
        """Return the architecture in terms of a GGUF file that has tensors, or weights, of these names.

        Some files have parts as folders have them; what others have counts first.
        """
        found, apart = " ".join(names), self.in_files

        def has_some(those: Sequence[Part], others: Sequence[Part]) -> bool:
            alone = (part for part in those if part not in others)
            return any(f".{name}." in found for part in alone for name in (part.name, part.gguf_name))

        is_whole = has_some(self.linears, apart.linears) and not has_some(apart.linears, self.linears)
        return replace(self, gguf=replace(self.gguf, linears=None)) if is_whole else apart

    def linears_of(self, shape: LayerShape) -> tuple[Part, ...]:
        """Return the linear layers of a layer, but for those of its experts and of a token's own numbers."""
        return tuple(part for part in self.places_of(shape) if part.is_in(shape))

    def parts_of(self, shape: LayerShape) -> tuple[Part, ...]:
        """Return the parts of a layer."""
        experts = shape.experts
        of_experts = (part for part in self.expert_parts.values() if part.is_in(shape) and experts is not None)
        each = (one for part in of_experts for one in part.of_each(0 if experts is None else experts.count))
        of_inputs = self.input_parts.values() if shape.input_width else ()
        others = (*of_inputs, *self.norms.values(), *self.vectors.values(), *self.filters)
        return (*self.linears_of(shape), *each, *(part for part in others if part.is_in(shape)))

    def vectors_of(self, shape: LayerShape) -> "dict[VectorPlace, Part]":
        """Return the vectors of a layer."""
        return {place: part for place, part in self.vectors.items() if part.is_in(shape)}

    @property
    def has_wide_norms(self) -> bool:
        """True if queries and keys have norms, each over all heads at once."""
        return "query" in self.norms and self.norms["query"].shape != ("head",)

    @property
    def may_lack_experts(self) -> bool:
        """True if experts stand beside MLPs, so that models without any have all else."""
        return "mlp_alone" in self.norms

    def unread(self, shape: LayerShape) -> tuple[Part, ...]:
        """Return parts of a layer that files may have though it reads the keys and values of another one."""
        if shape.kv_source is None:
            return ()
        alone = replace(shape, kv_source=None)
        return tuple(part for part in self.parts if part.is_in(alone) and not part.is_in(shape))

    def is_vector(self, name: str) -> bool:
        """Return whether a weight of this name is a vector."""
        return any(name.endswith(f".{part.name}") for part in self.vectors.values())

    def stated_bias(self, part: Part) -> str | bool:
        """Return whether a part has a bias, or which field of the config says it."""
        return self.biases.get(part.bias, False) if part.bias else False

    def has_bias(self, part: Part, config: Any) -> bool:
        """Return whether a part has a bias in a model of this config."""
        stated = self.stated_bias(part)
        return bool(getattr(config, stated)) if isinstance(stated, str) else stated

    def gate_activation(self, config: Any) -> str:
        """Return the name of the gate's activation."""
        return "silu" if self.activation is None else str(getattr(config, self.activation))

    def layer_shape(self, config: Any, layer: int) -> LayerShape:
        """Return the shape of a layer."""
        shape = self.shapes(config, layer)
        return shape if self.experts is None else self.experts.of_layer(shape, config, layer)

    def scale(self, name: Scale, config: Any, usual: float = 1.0) -> float:
        """Return a factor, or what the logits are divided by; ``usual`` if the entry states none."""
        stated = self.scales.get(name)
        if callable(stated):
            return stated(config)
        if stated is not None:
            factor = float(getattr(config, stated))
            return 1 / factor if name == "logits" and self.multiplies_logits else factor
        return usual

    def embedding_scale(self, config: Any, dtype: Dtype) -> float:
        """Return the factor of the embeddings; one that the config does not state is in their dtype."""
        scale = self.scale("embedding", config)
        return float(np.array(scale).astype(dtype)) if callable(self.scales.get("embedding")) else scale

    def cap(self, name: Cap, config: Any) -> float | None:
        """Return the bound of scores or logits; None if there is none."""
        bound = getattr(config, self.caps[name]) if name in self.caps else None
        return None if bound is None else float(bound)

    def rotary_kinds(self, config: Any) -> list[str | None]:
        """Return which of the `rotary_parameters` each layer has; None for a layer that knows no positions."""
        kinds = () if "" in rotary_parameters(config) else getattr(config, "layer_types", None) or ()
        layers = range(config.num_hidden_layers)
        known = [kinds[i] if i < len(kinds) else "" for i in layers]
        return [kind if kind not in self.mixers and self.turns(config, i) else None for i, kind in enumerate(known)]

    def refusal(self, config: Any) -> str | None:
        """Return why a config asks for more than is built here; None if it does not."""
        for name, asked in self.unbuilt.items():
            if getattr(config, name) is not None and getattr(config, name) is not False:
                return f"{asked} ({name})"
        return self.why_not(config)


def rotary_parameters(config: Any) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each kind of rotary embedding, by the kind of layer; one under "" serves all layers."""
    stated: Mapping[str, Any] = config.rope_parameters
    # transformers reads yarn's "truncate" where it is stated for all layers, and only there
    nested = {
        kind: {name: value for name, value in one.items() if name != "truncate"}
        for kind, one in stated.items()
        if isinstance(one, Mapping)
    }
    return {**nested} or {"": stated}


def rotary_size(config: Any, kind: str, head_size: int) -> int:
    """Return how many of the first channels of a head turn. Raises: ModelError for an impossible share."""
    rope = rotary_parameters(config)[kind]
    if rope["rope_type"] == PROPORTIONAL:  # where the other channels turn by nothing
        return head_size
    part = rope.get("partial_rotary_factor", 1.0)
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise ModelError(
            f"partial_rotary_factor must be a number above 0 and at most 1, got {part!r}; correct config.json"
        )
    return int(head_size * part)


def neighbours_first(size: int, head_size: int) -> list[int]:
    """Return the channels of a head so that those of the first ``size`` that turn together are halves apart."""
    return [*range(0, size, 2), *range(1, size, 2), *range(size, head_size)]


def sizes_of(config: Any, shape: LayerShape) -> Mapping[Size, int]:
    """Return the sizes that the shapes of a layer's weights are made of."""
    size, inner, experts = shape.head_size, shape.mlp_width, shape.experts
    sizes: dict[Size, int] = {
        "hidden": config.hidden_size,
        "inner": inner,
        "queries": shape.num_heads * size,
        "keys": shape.num_kv_heads * size,
        "head": size,
        "heads": shape.num_heads,
        "qkv": (shape.num_heads + 2 * shape.num_kv_heads) * size,
        "gate_up": 2 * inner,
        "conv_in": 3 * config.hidden_size,
        "one": 1,
        "taps": shape.num_taps,
        "layer_input": shape.input_width,
        "gated_queries": 2 * shape.num_heads * size,
    }
    if shape.delta is not None:
        num_values = shape.delta.num_values
        sizes |= {
            "delta_in": shape.delta.num_inputs,
            "delta_values": num_values * shape.delta.value_size,
            "delta_heads": num_values,
            "delta_value": shape.delta.value_size,
            "delta_joined": shape.delta.num_inputs + num_values * shape.delta.value_size,
            "delta_scores": 2 * num_values,
        }
    if experts is not None:
        sizes |= {"experts": experts.count, "expert": experts.width, "shared": experts.shared_width}
        sizes["shared_both"] = 2 * experts.shared_width
    return sizes
