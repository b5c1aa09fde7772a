"""Qwen1.5 and Qwen2 with experts, and one more that all rows take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Architecture, ExpertPlace, Part, expert_parts
from card.models.architectures.qwen3_moe import GGUF_EXPERTS
from card.models.architectures.qwen3_moe import shape_of as shape_with_experts
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import LayerShape


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out; a window that is switched off is 0 there."""
    config.mlp_only_layers = config.mlp_only_layers or []
    if not config.use_sliding_window:
        config.layer_types = config.layer_types or ["full_attention"] * config.num_hidden_layers
        config.sliding_window = 0


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = shape_with_experts(config, layer)
    if shape.experts is None:
        return shape
    width = config.shared_expert_intermediate_size
    return replace(shape, experts=replace(shape.experts, shared_width=width, has_shared_gate=True))


SHARED_EXPERT: Mapping[ExpertPlace, Part] = {
    "shared_gate": Part("mlp.shared_expert.gate_proj", "ffn_gate_shexp", ("shared", "hidden")),
    "shared_up": Part("mlp.shared_expert.up_proj", "ffn_up_shexp", ("shared", "hidden")),
    "shared_down": Part("mlp.shared_expert.down_proj", "ffn_down_shexp", ("hidden", "shared")),
    "shared_score": Part("mlp.shared_expert_gate", "ffn_gate_inp_shexp", ("one", "hidden")),
}
ARCHITECTURE = Architecture(
    model_class="Qwen2MoeForCausalLM",
    config=ConfigRule(complete=_complete),
    biases={"qkv": "qkv_bias"},
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    shapes=shape_of,
    gguf_name="qwen2moe",
    gguf_experts={**GGUF_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    gguf_fields=lambda config: {"norm_topk_prob": False},
)
