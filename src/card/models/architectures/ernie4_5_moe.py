"""ERNIE 4.5 with experts, such as ERNIE-4.5-21B-A3B: biases count for the choice of experts alone."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Part, chooses_by_biases, expert_parts
from card.models.architectures.ernie4_5 import ARCHITECTURE as ERNIE
from card.models.architectures.glm4_moe import PLAIN_SHARED_EXPERT
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import Experts, LayerShape, stated_shape


def _complete(config: Any, others: dict[str, Any]) -> None:
    """State which layer is the last one with experts."""
    if config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer; those outside a range, and between every so-manieth one, have an MLP."""
    shape = stated_shape(config, layer)
    is_inside = config.moe_layer_start_index <= layer <= config.moe_layer_end_index
    if not is_inside or (layer + 1) % config.moe_layer_interval:
        return shape
    experts = Experts(
        count=config.moe_num_experts,
        chosen=config.moe_k,
        width=config.moe_intermediate_size,
        is_normed=True,
        has_biases=True,
        shared_width=config.moe_intermediate_size * config.moe_num_shared_experts,
    )
    return replace(shape, mlp_width=0, experts=experts)


def _why_not(config: Any) -> str | None:
    return "its layers have biases (use_bias)" if config.use_bias else None


_BIASES = "mlp.gate.moe_statics.e_score_correction_bias"
ARCHITECTURE = replace(
    ERNIE,
    model_class="Ernie4_5_MoeForCausalLM",
    config=ConfigRule(
        older_names={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}, complete=_complete
    ),
    expert_parts={**expert_parts(), **PLAIN_SHARED_EXPERT},
    vectors={"expert_biases": Part(_BIASES, "exp_probs_b.bias", ("one", "experts"), only=chooses_by_biases)},
    file_names={r"\.mlp\.moe_statics\.": ".mlp.gate.moe_statics."},
    shapes=_shape,
    why_not=_why_not,
    gguf_name="ernie4_5-moe",
    gguf_experts={
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_num_shared_experts": "expert_shared_count",
    },
    gguf_sizes={
        "moe_layer_start_index": "leading_dense_block_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    },
)
