"""Mixtral."""

from collections.abc import Mapping
from typing import Any

from card.models.architectures.architecture import Architecture, expert_parts
from card.models.decoder_config import RoutedConfig
from card.models.layer_shape import LayerShape, stated_shape, with_experts


class MixtralFields(RoutedConfig):
    """Its config."""

    model_type = "mixtral"
    default_theta = 1_000_000.0
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096 * 32
    rms_norm_eps: float = 1e-5
    num_experts_per_tok: int = 2
    num_local_experts: int = 8
    router_jitter_noise: float = 0.0


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer, whose MLPs are the experts."""
    shape = stated_shape(config, layer)
    return with_experts(shape, config, count=config.num_local_experts, width=shape.mlp_width, is_normed=True)


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
