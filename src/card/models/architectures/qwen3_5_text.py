"""Qwen3.5 and 3.6, dense: layers of the gated delta rule, and gated attention in each fourth."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.kernels.packed_linear import LANES
from card.models.architectures.architecture import TILED, Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.layer_shape import DeltaHeads, LayerShape
from card.models.parts import HEAD_NORMS, LINEARS, PRE_NORMS, NormPlace, Part, VectorPlace


def complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out."""
    if config.layer_types is None:
        config.give_kinds("linear_attention", others.pop("full_attention_interval", 4))


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    return mixed_shape(config, layer, config.intermediate_size)


def mixed_shape(config: Any, layer: int, mlp_width: int) -> LayerShape:
    """Return the shape of a layer with an MLP of this width."""
    shape = LayerShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, mlp_width)
    if config.layer_types[layer] != "linear_attention":
        return replace(shape, has_gates=True)
    heads = DeltaHeads(
        num_keys=config.linear_num_key_heads,
        num_values=config.linear_num_value_heads,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
        is_tiled=getattr(config, TILED, False),
    )
    return replace(shape, mixer="delta_rule", num_taps=config.linear_conv_kernel_dim, delta=heads)


GATED_ATTENTION = (
    Part("self_attn.q_proj", "attn_q", ("gated_queries", "hidden"), "qkv", mixer="attention"),
    Part("self_attn.k_proj", "attn_k", ("keys", "hidden"), "qkv", mixer="attention"),
    Part("self_attn.v_proj", "attn_v", ("keys", "hidden"), "qkv", mixer="attention"),
    Part("self_attn.o_proj", "attn_output", ("hidden", "queries"), "out", mixer="attention"),
)
INPUTS = (
    Part("linear_attn.in_proj_qkv", "attn_qkv", ("delta_in", "hidden"), mixer="delta_rule"),
    Part("linear_attn.in_proj_z", "attn_gate", ("delta_values", "hidden"), mixer="delta_rule"),
)
DELTA_OUT = Part("linear_attn.out_proj", "ssm_out", ("hidden", "delta_values"), mixer="delta_rule")
NORMS: Mapping[NormPlace, Part] = {
    "attention_in": PRE_NORMS["attention_in"],
    "mlp_in": replace(PRE_NORMS["mlp_in"], gguf_name="post_attention_norm"),
    "query": replace(HEAD_NORMS["query"], mixer="attention"),
    "key": replace(HEAD_NORMS["key"], mixer="attention"),
    "delta_out": Part("linear_attn.norm", "ssm_norm", ("delta_value",), mixer="delta_rule"),
}
FILTERS = (Part("linear_attn.conv1d", "ssm_conv1d", ("delta_in", "one", "taps"), mixer="delta_rule"),)
VECTORS: Mapping[VectorPlace, Part] = {
    "rates": Part("linear_attn.A_log", "ssm_a", ("delta_heads",), mixer="delta_rule"),
    "step_biases": Part("linear_attn.dt_bias", "ssm_dt.bias", ("delta_heads",), mixer="delta_rule"),
}


def _why_not(config: Any) -> str | None:
    """Return why heads of the delta rule are not run here; None if they are."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = config.linear_key_head_dim, config.linear_value_head_dim
    if min(keys, values, *sizes) < 1 or values % keys:
        return f"it has {values} heads of values for {keys} of keys"
    if any(size % LANES for size in sizes):
        return f"its delta rule has heads of {sizes[0]} and {sizes[1]} channels, which are no multiples of {LANES}"
    return None


GGUF_SIZES = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_inner_size": "ssm.inner_size",
}


def gguf_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the size of value heads, of which files state the sum."""
    return {"linear_value_head_dim": config["linear_inner_size"] // config["linear_num_value_heads"]}


ARCHITECTURE = Architecture(
    model_class="Qwen3_5ForCausalLM",
    config=ConfigRule(turned_part=0.25, complete=complete),
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    linears=(
        *GATED_ATTENTION,
        *INPUTS,
        Part("linear_attn.in_proj_b", "ssm_beta", ("delta_heads", "hidden"), mixer="delta_rule"),
        Part("linear_attn.in_proj_a", "ssm_alpha", ("delta_heads", "hidden"), mixer="delta_rule"),
        DELTA_OUT,
        *LINEARS[4:],
    ),
    norms=NORMS,
    filters=FILTERS,
    vectors=VECTORS,
    mixers={"linear_attention": "delta_rule"},
    norm_offset=1.0,
    shapes=shape_of,
    turns_parts=True,
    why_not=_why_not,
    gguf=GgufMap(
        name="qwen35",
        sizes=GGUF_SIZES,
        fields=gguf_fields,
        period=4,
        is_tiled=True,
        ignored=frozenset({"rope.dimension_sections"}),
    ),
)
