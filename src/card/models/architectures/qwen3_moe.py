"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import expert_parts
from card.models.architectures.qwen2 import Qwen2Fields
from card.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from card.models.decoder_config import RoutedConfig
from card.models.layer_shape import LayerShape, stated_shape, with_experts


class QwenMoeFields(RoutedConfig, Qwen2Fields):
    """The config of Qwen2 and Qwen3 with experts."""

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    decoder_sparse_step: int = 1
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        """Write out that no layer is without experts."""
        self.mlp_only_layers = self.mlp_only_layers or []
        super().__post_init__(**others)


class Qwen3MoeFields(QwenMoeFields):
    """Its config, with two names for the number of experts."""

    model_type = "qwen3_moe"
    intermediate_size: int = 6144
    num_key_value_heads: int = 4
    attention_bias: bool = False
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_experts: int = 128

    def __post_init__(self, **others: Any) -> None:
        """Take the number of experts under its other name."""
        self.num_experts = self.num_local_experts = others.pop("num_local_experts", self.num_experts)
        super().__post_init__(**others)


def has_experts(config: Any, layer: int) -> bool:
    """Return whether a layer has experts: others have a plain MLP."""
    is_one = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    return is_one and layer not in config.mlp_only_layers


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = stated_shape(config, layer)
    return with_experts(shape, config) if has_experts(config, layer) else shape


GGUF_EXPERTS: Mapping[str, str] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ARCHITECTURE = replace(
    QWEN3,
    model_class="Qwen3MoeForCausalLM",
    config_class=Qwen3MoeFields,
    expert_parts=expert_parts(),
    shapes=shape_of,
    gguf_name="qwen3moe",
    gguf_also="qwen3vlmoe",
    gguf_experts=GGUF_EXPERTS,
    gguf_fields=lambda config: {"norm_topk_prob": True},
)
