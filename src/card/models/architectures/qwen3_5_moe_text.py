"""Qwen3.5 and 3.6 with experts: what the dense ones have, and experts in each layer beside one that all rows take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from card.models.architectures.architecture import LINEARS, SHARED_EXPERT, expert_parts
from card.models.architectures.qwen2_moe import ARCHITECTURE as QWEN2_MOE
from card.models.architectures.qwen3_5_text import ARCHITECTURE as QWEN35
from card.models.architectures.qwen3_5_text import Qwen35Fields, mixed_shape
from card.models.decoder_config import RoutedConfig
from card.models.layer_shape import LayerShape, with_experts


class Qwen35MoeFields(RoutedConfig, Qwen35Fields):
    """Its config."""

    model_type = "qwen3_5_moe_text"
    older_names: ClassVar[Mapping[str, str]] = {"intermediate_size": "moe_intermediate_size"}  # all that is stated
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 8
    num_experts: int = 256


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
    config_class=Qwen35MoeFields,
    linears=tuple(part for part in QWEN35.linears if part not in LINEARS),
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    shapes=routed_shape,
    gguf_name="qwen35moe",
    gguf_experts=QWEN2_MOE.gguf_experts,
)
