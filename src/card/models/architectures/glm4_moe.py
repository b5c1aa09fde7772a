"""GLM-4.5 and GLM-4.5-Air: experts behind a router of sigmoids, one more that all rows take, and halves of heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import (
    HEAD_NORMS,
    PLAIN_SHARED_EXPERT,
    PRE_NORMS,
    Architecture,
    NormPlace,
    Part,
    VectorPlace,
    chooses_by_biases,
    expert_parts,
)
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import LayerShape, stated_shape, with_experts


class Glm4MoeFields(DecoderConfig):
    """Its config, with two names for the number of experts. Unless it says otherwise, half of each head turns."""

    model_type = "glm4_moe"
    vocab_size: int = 151552
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 8
    output_router_logits: bool = False
    n_shared_experts: int = 1
    n_routed_experts: int = 128
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    use_qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    num_mtp_layers: int = 1

    def __post_init__(self, **others: Any) -> None:
        """State which part of a head turns, and take fields under their other names."""
        others.setdefault("partial_rotary_factor", 0.5)
        self.n_routed_experts = others.pop("num_local_experts", self.n_routed_experts)
        self.num_mtp_layers = self.num_nextn_predict_layers = others.pop(
            "num_nextn_predict_layers", self.num_mtp_layers
        )
        super().__post_init__(**others)


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
    config_class=Glm4MoeFields,
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
