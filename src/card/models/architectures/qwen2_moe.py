"""Qwen1.5 and Qwen2 with experts, and one more that all rows take."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import SHARED_EXPERT, Architecture, expert_parts
from card.models.architectures.qwen3_moe import GGUF_EXPERTS
from card.models.architectures.qwen3_moe import shape_of as shape_with_experts
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import LayerShape


class Qwen2MoeFields(DecoderConfig):
    """Its config, with the kind of each layer written out; a window that is switched off is 0 there."""

    model_type = "qwen2_moe"
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    decoder_sparse_step: int = 1
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts_per_tok: int = 4
    num_experts: int = 60
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    mlp_only_layers: list[int] | None = None
    qkv_bias: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        """Write the kind of each layer out."""
        self.mlp_only_layers = self.mlp_only_layers or []
        if not self.use_sliding_window:
            self.sliding_window = 0
            self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**others)


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
