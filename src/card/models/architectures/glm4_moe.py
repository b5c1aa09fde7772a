"""GLM-4.5 and GLM-4.5-Air: experts behind a router of sigmoids, one more that all rows take, and halves of heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import (
    HEAD_NORMS,
    PRE_NORMS,
    Architecture,
    ExpertPlace,
    NormPlace,
    Part,
    VectorPlace,
    chooses_by_biases,
    expert_parts,
    has_shared_expert,
)
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import LayerShape, stated_shape, with_experts


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer; the first ones have an MLP in the place of experts."""
    shape = stated_shape(config, layer)
    if layer < config.first_k_dense_replace:
        return shape
    return with_experts(
        shape,
        config,
        count=config.n_routed_experts,
        scale=config.routed_scaling_factor,
        has_sigmoids=True,
        sum_offset=1e-20,
        has_biases=True,
        shared_width=config.moe_intermediate_size * config.n_shared_experts,
    )


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    return replace(shape_of(config, layer), has_head_norms=config.use_qk_norm)


def why_not(config: Any) -> str | None:
    """Return why a config asks for more than is built here; None if it does not."""
    if config.n_group == config.topk_group:
        return None
    return f"its tokens take experts of {config.topk_group} of {config.n_group} groups (topk_group, n_group)"


def _has_head_norms(shape: LayerShape) -> bool:
    return shape.has_head_norms


def _gguf_layers(facts: Any, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return whether heads have norms, as files tell by their tensors; weights are over no sum unless they say so."""
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors, "norm_topk_prob": False}


# Of the expert that all rows take as it is.
PLAIN_SHARED_EXPERT: Mapping[ExpertPlace, Part] = {
    "shared_gate": Part("mlp.shared_experts.gate_proj", "ffn_gate_shexp", ("shared", "hidden"), only=has_shared_expert),
    "shared_up": Part("mlp.shared_experts.up_proj", "ffn_up_shexp", ("shared", "hidden"), only=has_shared_expert),
    "shared_down": Part("mlp.shared_experts.down_proj", "ffn_down_shexp", ("hidden", "shared"), only=has_shared_expert),
}
VECTORS: Mapping[VectorPlace, Part] = {
    "expert_biases": Part("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", ("experts",), only=chooses_by_biases),
}
GGUF_EXPERTS: Mapping[str, str] = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
}
_NORMS: Mapping[NormPlace, Part] = {
    **PRE_NORMS,
    "mlp_in": replace(PRE_NORMS["mlp_in"], gguf_name="post_attention_norm"),
    **{place: replace(part, only=_has_head_norms) for place, part in HEAD_NORMS.items()},
}
ARCHITECTURE = Architecture(
    model_class="Glm4MoeForCausalLM",
    config=ConfigRule(
        older_names={"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        turned_part=0.5,
    ),
    biases={"qkv": "attention_bias"},
    expert_parts={**expert_parts(), **PLAIN_SHARED_EXPERT},
    norms=_NORMS,
    vectors=VECTORS,
    shapes=_shape,
    turns_parts=True,
    why_not=why_not,
    gguf_name="glm4moe",
    gguf_has_sigmoids=True,
    gguf_experts=GGUF_EXPERTS,
    gguf_expert_scale="routed_scaling_factor",
    gguf_sizes={"first_k_dense_replace": "leading_dense_block_count"},
    gguf_layers=_gguf_layers,
)
