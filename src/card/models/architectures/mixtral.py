"""Mixtral."""

from collections.abc import Mapping
from typing import Any

from card.models.architectures.architecture import Architecture, expert_parts
from card.models.layer_shape import LayerShape, stated_shape, with_experts


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer, whose MLPs are the experts."""
    shape = stated_shape(config, layer)
    return with_experts(shape, config, count=config.num_local_experts, width=shape.mlp_width, is_normed=True)


GGUF_EXPERTS: Mapping[str, str] = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
ARCHITECTURE = Architecture(
    model_class="MixtralForCausalLM",
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
