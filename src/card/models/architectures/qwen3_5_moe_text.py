"""Qwen3.5 and 3.6 with experts: what the dense ones have, and experts in each layer beside one that all rows take."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import LINEARS, expert_parts
from card.models.architectures.qwen2_moe import ARCHITECTURE as QWEN2_MOE
from card.models.architectures.qwen2_moe import SHARED_EXPERT
from card.models.architectures.qwen3_5_text import ARCHITECTURE as QWEN35
from card.models.architectures.qwen3_5_text import mixed_shape
from card.models.layer_shape import LayerShape, with_experts


def routed_shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer with experts, one of which all rows take."""
    return with_experts(
        mixed_shape(config, layer, 0),
        config,
        is_normed=getattr(config, "norm_topk_prob", True),  # which only Qwen3-Next states
        shared_width=config.shared_expert_intermediate_size,
        has_shared_gate=True,
    )


ARCHITECTURE = replace(
    QWEN35,
    model_class="Qwen3_5MoeForCausalLM",
    config=replace(QWEN35.config, width="moe_intermediate_size"),
    linears=tuple(part for part in QWEN35.linears if part not in LINEARS),
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    shapes=routed_shape,
    gguf_name="qwen35moe",
    gguf_experts=QWEN2_MOE.gguf_experts,
)
