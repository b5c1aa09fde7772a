"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import expert_parts
from card.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import Experts, LayerShape, stated_shape


class Qwen3MoeFields(DecoderConfig):
    """Its config, with a window that counts only where it is switched on, and two names for the number of experts."""

    model_type = "qwen3_moe"
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 768
    num_experts_per_tok: int = 8
    num_experts: int = 128
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        """Drop the window that is switched off."""
        if not self.use_sliding_window:
            self.sliding_window = None
        self.mlp_only_layers = self.mlp_only_layers or []
        self.num_experts = self.num_local_experts = others.pop("num_local_experts", self.num_experts)
        super().__post_init__(**others)


def has_experts(config: Any, layer: int) -> bool:
    """Return whether a layer has experts: others have a plain MLP."""
    is_one = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
    return is_one and layer not in config.mlp_only_layers


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = stated_shape(config, layer)
    if not has_experts(config, layer):
        return shape
    experts = Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        is_normed=config.norm_topk_prob,
    )
    return replace(shape, mlp_width=0, experts=experts)


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
