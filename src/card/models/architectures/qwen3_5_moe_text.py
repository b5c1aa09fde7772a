"""Qwen3.5 and 3.6 with experts: what the dense ones have, and experts in each layer beside one that all rows take."""

from dataclasses import replace
from typing import Any

from card.models.architectures.qwen2_moe import SHARED_EXPERT
from card.models.architectures.qwen3_5_text import ARCHITECTURE as QWEN35
from card.models.architectures.qwen3_5_text import mixed_shape
from card.models.layer_shape import ExpertRule, LayerShape
from card.models.parts import LINEARS, expert_parts


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer, all of which have experts: transformers' config states no other width."""
    return mixed_shape(config, layer, config.moe_intermediate_size)


EXPERTS = ExpertRule(shared_width="shared_expert_intermediate_size", has_shared_gate=True)
ARCHITECTURE = replace(
    QWEN35,
    model_class="Qwen3_5MoeForCausalLM",
    config=replace(QWEN35.config, width="moe_intermediate_size"),
    linears=tuple(part for part in QWEN35.linears if part not in LINEARS),
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    shapes=_shape,
    experts=EXPERTS,
    gguf=replace(QWEN35.gguf, name="qwen35moe"),
)
