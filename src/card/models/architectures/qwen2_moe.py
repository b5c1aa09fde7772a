"""Qwen1.5 and Qwen2 with experts, and one more that all rows take."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import SHARED_EXPERT, Architecture, expert_parts
from card.models.architectures.qwen3_moe import GGUF_EXPERTS, QwenMoeFields
from card.models.architectures.qwen3_moe import shape_of as shape_with_experts
from card.models.layer_shape import LayerShape


class Qwen2MoeFields(QwenMoeFields):
    """Its config, with the kind of each layer written out; a window that is switched off is 0 there."""

    model_type = "qwen2_moe"
    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts_per_tok: int = 4
    num_experts: int = 60
    qkv_bias: bool = True

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        if not self.use_sliding_window:
            self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**others)
        if not self.use_sliding_window:
            self.sliding_window = 0


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = shape_with_experts(config, layer)
    if shape.experts is None:
        return shape
    width = config.shared_expert_intermediate_size
    return replace(shape, experts=replace(shape.experts, shared_width=width, has_shared_gate=True))


ARCHITECTURE = Architecture(
    model_class="Qwen2MoeForCausalLM",
    config_class=Qwen2MoeFields,
    biases={"qkv": "qkv_bias"},
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    shapes=shape_of,
    gguf_name="qwen2moe",
    gguf_experts={**GGUF_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    gguf_fields=lambda config: {"norm_topk_prob": False},
)
