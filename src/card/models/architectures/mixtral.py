"""Mixtral."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Architecture, expert_parts
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import Experts, LayerShape, stated_shape


class MixtralFields(DecoderConfig):
    """Its config."""

    model_type = "mixtral"
    default_theta = 1_000_000.0
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096 * 32
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer, whose MLPs are the experts."""
    shape = stated_shape(config, layer)
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        width=shape.mlp_width,
        is_normed=True,
    )
    return replace(shape, mlp_width=0, experts=experts)


GGUF_EXPERTS: Mapping[str, str] = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
ARCHITECTURE = Architecture(
    model_class="MixtralForCausalLM",
    config_class=MixtralFields,
    expert_parts=expert_parts(),
    file_names={
        ".block_sparse_moe.": ".mlp.",
        ".w1.weight": ".gate_proj.weight",
        ".w2.weight": ".down_proj.weight",
        ".w3.weight": ".up_proj.weight",
    },
    has_windows=True,
    shapes=shape_of,
    gguf_name="llama",
    gguf_pairs=True,
    gguf_experts=GGUF_EXPERTS,
)
