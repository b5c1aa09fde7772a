"""GLM-4.5 and GLM-4.5-Air: experts behind a router of sigmoids, one more that all rows take, and halves of heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.layer_shape import ExpertRule, LayerShape, stated_shape
from card.models.parts import (
    HEAD_NORMS,
    PRE_NORMS,
    ExpertPlace,
    NormPlace,
    Part,
    expert_biases,
    expert_parts,
    has_shared_expert,
)


def _shape(config: Any, layer: int) -> LayerShape:
    return replace(stated_shape(config, layer), has_head_norms=config.use_qk_norm)


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
EXPERTS = ExpertRule(
    count="n_routed_experts",
    first="first_k_dense_replace",
    scale="routed_scaling_factor",
    shared="n_shared_experts",
    has_sigmoids=True,
    sum_offset=1e-20,
    has_biases=True,
)
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
    experts=EXPERTS,
    expert_parts={**expert_parts(), **PLAIN_SHARED_EXPERT},
    norms=_NORMS,
    vectors=expert_biases("mlp.gate.e_score_correction_bias"),
    shapes=_shape,
    turns_parts=True,
    why_not=why_not,
    gguf=GgufMap(name="glm4moe", expert_scale="routed_scaling_factor", layers=_gguf_layers),
)
