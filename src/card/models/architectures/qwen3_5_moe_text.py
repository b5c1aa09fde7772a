"""Qwen3.5 and 3.6 with experts: what the dense ones have, and experts in each layer beside one that all rows take."""

from dataclasses import replace

from card.models.architectures.qwen2_moe import SHARED_EXPERT
from card.models.architectures.qwen3_5_text import ARCHITECTURE as QWEN35
from card.models.architectures.qwen3_5_text import mixed_shape
from card.models.layer_shape import ExpertRule
from card.models.parts import LINEARS, expert_parts

EXPERTS = ExpertRule(shared_width="shared_expert_intermediate_size", has_shared_gate=True)
ARCHITECTURE = replace(
    QWEN35,
    model_class="Qwen3_5MoeForCausalLM",
    config=replace(QWEN35.config, width="moe_intermediate_size"),
    linears=tuple(part for part in QWEN35.linears if part not in LINEARS),
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    shapes=lambda config, layer: mixed_shape(config, layer, config.moe_intermediate_size),  # no other width is stated
    experts=EXPERTS,
    gguf=replace(QWEN35.gguf, name="qwen35moe"),
)
