"""Qwen3.5 and 3.6 with experts: what the dense ones have, and experts in each layer beside one that all rows take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from card.models.architectures.architecture import LINEARS, SHARED_EXPERT, expert_parts
from card.models.architectures.qwen2_moe import ARCHITECTURE as QWEN2_MOE
from card.models.architectures.qwen3_5_text import ARCHITECTURE as QWEN35
from card.models.architectures.qwen3_5_text import Qwen35Fields, mixed_shape
from card.models.layer_shape import Experts, LayerShape


class Qwen35MoeFields(Qwen35Fields):
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
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


def experts_of(config: Any) -> Experts:
    """Return the experts of a layer."""
    return Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        is_normed=getattr(config, "norm_topk_prob", True),
        shared_width=config.shared_expert_intermediate_size,
        has_shared_gate=True,
    )


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    return replace(mixed_shape(config, layer, 0), experts=experts_of(config))


ARCHITECTURE = replace(
    QWEN35,
    model_class="Qwen3_5MoeForCausalLM",
    config_class=Qwen35MoeFields,
    linears=tuple(part for part in QWEN35.linears if part not in LINEARS),
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    shapes=_shape,
    gguf_name="qwen35moe",
    gguf_experts=QWEN2_MOE.gguf_experts,
)
