"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import expert_parts
from card.models.architectures.qwen2 import drop_window
from card.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import LayerShape, stated_shape, with_experts


def complete(config: Any, others: dict[str, Any]) -> None:
    """Write out that no layer is without experts, and drop a window that is switched off."""
    config.mlp_only_layers = config.mlp_only_layers or []
    drop_window(config, others)


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
    config=ConfigRule(older_names={"num_experts": "num_local_experts"}, complete=complete),
    expert_parts=expert_parts(),
    shapes=shape_of,
    gguf_name="qwen3moe",
    gguf_also="qwen3vlmoe",
    gguf_experts=GGUF_EXPERTS,
    gguf_fields=lambda config: {"norm_topk_prob": True},
)
