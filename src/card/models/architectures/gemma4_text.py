"""Gemma 4 of text: larger heads in layers without a window, and shared keys, own numbers of tokens, or experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.kernels.rotation import PROPORTIONAL
from card.models.architectures.architecture import Architecture
from card.models.architectures.gemma2 import NORMS, embedding_scale
from card.models.decoder_config import ConfigRule
from card.models.files.gguf.header import GgufError
from card.models.gguf_map import GgufMap
from card.models.layer_shape import ExpertRule, LayerShape, of_layer
from card.models.parts import HEAD_NORMS, LINEARS, Part

_FULL = "full_attention"
_SHARED = "num_kv_shared_layers"
_FREQUENCIES = "rope_freqs.weight"  # of layers without a window, in GGUF files


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out, and what layers without a window have of their own.

    What they state otherwise stands in ``per_layer_config``, by their numbers.
    """
    config.give_windows(6)
    config.layer_types[-1] = _FULL
    if config.rope_parameters is None:
        config.rope_parameters = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            _FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        }
    size, kv_heads = others.pop("global_head_dim", 512), others.pop("num_global_key_value_heads", None)
    differing = {"head_dim": size}
    if config.attention_k_eq_v and kv_heads is not None:
        differing["num_key_value_heads"] = kv_heads
    full = {idx: differing for idx, kind in enumerate(config.layer_types) if kind == _FULL}
    config.per_layer_config = _unlike_others(config, others.pop("per_layer_config", full))


def _angles(config: Any, others: dict[str, Any]) -> dict[str, Any]:
    """Complete the settings of the angles; there are no older fields."""
    config.complete_angles()
    return others


def _unlike_others(config: Any, stated: Mapping[Any, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what layers state otherwise than all do, as transformers writes it."""
    unlike = {
        int(idx): {name: value for name, value in differing.items() if value != getattr(config, name)}
        for idx, differing in stated.items()
    }
    unlike = {idx: differing for idx, differing in unlike.items() if differing}
    digits = len(str(max(unlike, default=0)))
    return {str(idx).zfill(digits): differing for idx, differing in unlike.items()}


def _of_layer(config: Any, layer: int) -> tuple[int, int]:
    """Return KV heads and the size of a head, by a config of ours or of transformers."""
    by_layer, names = config.per_layer_config, ("num_key_value_heads", "head_dim")
    if not isinstance(by_layer, Mapping):
        kv_heads, size = (getattr(by_layer[layer], name) for name in names)
        return kv_heads, size
    stated = {int(idx): one for idx, one in by_layer.items()}.get(layer, {})
    kv_heads, size = (stated.get(name, getattr(config, name)) for name in names)
    return kv_heads, size


def _kv_source(config: Any, layer: int) -> int | None:
    """Return the last layer of a layer's kind that has keys of its own, if this one has none."""
    kinds, first = config.layer_types, config.num_hidden_layers - getattr(config, _SHARED)
    if layer < first:
        return None
    return next(idx for idx in reversed(range(first)) if kinds[idx] == kinds[layer])


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer. Raises: StopIteration if it shares keys and none before it is of its kind."""
    kv_heads, size = _of_layer(config, layer)
    source = _kv_source(config, layer)
    is_wide = config.use_double_wide_mlp and source is not None
    return LayerShape(
        config.num_attention_heads,
        kv_heads,
        size,
        config.intermediate_size * (2 if is_wide else 1),
        kv_source=source,
        has_values=not (config.attention_k_eq_v and config.layer_types[layer] == _FULL),
        input_width=config.hidden_size_per_layer_input,
    )


def _why_not(config: Any) -> str | None:
    if getattr(config, _SHARED) and config.num_hidden_layers - getattr(config, _SHARED) < 1:
        return "all its layers share keys, and none makes them"
    if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input < config.vocab_size:
        return "some of its tokens have no numbers for its layers"
    return None


def _has_keys(shape: LayerShape) -> bool:
    return shape.kv_source is None


def _has_experts(shape: LayerShape) -> bool:
    return shape.experts is not None


def _has_values(shape: LayerShape) -> bool:
    return shape.kv_source is None and shape.has_values


def _gguf_layers(facts: Any, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields about unequal layers. Raises: GgufError if they are unequal in another way."""
    if "layer_types" not in config or _FREQUENCIES not in tensors:
        what = "its attention.sliding_window_pattern" if "layer_types" not in config else f"its tensor {_FREQUENCIES}"
        raise GgufError(f"is incomplete: {what} is missing")
    kinds, rope = config["layer_types"], config["rope_parameters"]
    full, size = config["head_dim"], facts.whole("attention.key_length_swa", config["head_dim"])
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if facts.whole(key, size) != size:
            raise GgufError(f"has heads whose parts differ in size: {key} is not {size}; use the model's folder")
    sizes = [full if kind == _FULL else size for kind in kinds]
    kv_heads = [of_layer(config["num_key_value_heads"], idx) for idx in range(len(kinds))]
    layers = zip(sizes, kv_heads, strict=True)
    shared, width = (
        _stated_or_0(facts, key) for key in ("attention.shared_kv_layers", "embedding_length_per_layer_input")
    )
    if shared >= len(kinds):
        raise GgufError(f"cannot be used: its attention.shared_kv_layers is {shared}, of {len(kinds)} layers")
    cached = [idx for idx, kind in enumerate(kinds) if kind == _FULL and idx < len(kinds) - shared]
    table = tensors.get("per_layer_token_embd.weight")
    return {
        **_mlp_width(config["intermediate_size"], len(kinds), shared),
        "sliding_window": facts.whole("attention.sliding_window"),
        "head_dim": size,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(idx): {"head_dim": width, "num_key_value_heads": count} for idx, (width, count) in enumerate(layers)
        },
        _SHARED: shared,
        "attention_k_eq_v": any(f"blk.{idx}.attn_v.weight" not in tensors for idx in cached),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "enable_moe_block": bool(facts.optional("expert_count", 0)),
        "rope_parameters": {
            _FULL: rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def _stated_or_0(facts: Any, key: str) -> int:
    """Return a whole number, 0 if a file does not state it."""
    return 0 if facts.optional(key, None) is None else int(facts.each_layer(key, least=0))


def _mlp_width(stated: int | list[int], num_layers: int, shared: int) -> dict[str, Any]:
    """Return the fields about the width of the MLPs, which may be twice that of the others in the last layers."""
    widths = stated if isinstance(stated, list) else [stated] * num_layers
    usual, last = widths[0], widths[-1]
    if last not in (usual, 2 * usual) or widths != [usual] * (num_layers - shared) + [last] * shared:
        raise GgufError("has MLPs of widths that are not known here; use a folder saved by transformers")
    return {"intermediate_size": usual, "use_double_wide_mlp": last != usual}


_QUERY, _KEY, _VALUE, *_OTHERS = LINEARS
ARCHITECTURE = Architecture(
    model_class="Gemma4ForCausalLM",
    config=ConfigRule(angles=_angles, complete=_complete),
    outer_type="gemma4",
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    scales={"attention": lambda config: 1.0, "embedding": embedding_scale},
    caps={"logits": "final_logit_softcapping"},
    linears=(_QUERY, replace(_KEY, only=_has_keys), replace(_VALUE, only=_has_values), *_OTHERS),
    norms={
        **NORMS,
        "query": HEAD_NORMS["query"],
        "key": replace(HEAD_NORMS["key"], only=_has_keys),
        "input_out": Part(
            "post_per_layer_input_norm", "post_norm", ("hidden",), only=lambda shape: shape.input_width > 0
        ),
        "mlp_alone": Part("post_feedforward_layernorm_1", "post_ffw_norm_1", ("hidden",), only=_has_experts),
        "experts_in": Part("pre_feedforward_layernorm_2", "pre_ffw_norm_2", ("hidden",), only=_has_experts),
        "experts_out": Part("post_feedforward_layernorm_2", "post_ffw_norm_2", ("hidden",), only=_has_experts),
    },
    norms_values=True,
    layer_inputs="hidden_size_per_layer_input",
    input_parts={
        "gate": Part("per_layer_input_gate", "inp_gate", ("layer_input", "hidden")),
        "out": Part("per_layer_projection", "proj", ("hidden", "layer_input")),
    },
    vectors={
        "layer": Part("layer_scalar", "layer_output_scale.weight", ("one",)),
        "router": Part("router.scale", "ffn_gate_inp.scale", ("hidden",), only=_has_experts),
        "experts": Part("router.per_expert_scale", "ffn_down_exps.scale", ("experts",), only=_has_experts),
    },
    expert_parts={
        "router": Part("router.proj", "ffn_gate_inp", ("experts", "hidden")),
        "gate": Part("experts.{}.gate_proj", "ffn_gate_exps", ("expert", "hidden")),
        "up": Part("experts.{}.up_proj", "ffn_up_exps", ("expert", "hidden")),
        "down": Part("experts.{}.down_proj", "ffn_down_exps", ("hidden", "expert")),
    },
    activation="hidden_activation",
    has_windows=True,
    shapes=shape_of,
    experts=ExpertRule(chosen="top_k_experts", is_normed=True, enabled="enable_moe_block", keeps_mlp=True),
    turns_parts=True,
    why_not=_why_not,
    gguf=GgufMap(
        name="gemma4", layers=_gguf_layers, keys=("attention.shared_kv_layers", "embedding_length_per_layer_input")
    ),
)
