"""ERNIE 4.5 with experts, such as ERNIE-4.5-21B-A3B: biases count for the choice of experts alone."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import PLAIN_SHARED_EXPERT, Part, chooses_by_biases, expert_parts
from card.models.architectures.ernie4_5 import ARCHITECTURE as ERNIE
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import Experts, LayerShape, stated_shape


class Ernie45MoeFields(DecoderConfig):
    """Its config, with other names for the number of experts and of those that a token takes."""

    model_type = "ernie4_5_moe"
    default_theta = 500000.0
    vocab_size: int = 103424
    pad_token_id: int | None = 0
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool | None = False
    moe_intermediate_size: int = 1536
    moe_k: int | None = 6
    moe_num_experts: int | None = 64
    moe_num_shared_experts: int | None = 2
    moe_layer_start_index: int | None = 1
    moe_layer_end_index: int | None = -1
    moe_layer_interval: int | None = 1
    moe_norm_min: float | None = 1e-12
    output_router_logits: bool | None = False
    router_aux_loss_coef: float | None = 0.001

    def __post_init__(self, **others: Any) -> None:
        """State which layer is the last one with experts, and take fields under their other names."""
        self.moe_num_experts = others.pop("num_experts", self.moe_num_experts)
        self.moe_k = others.pop("num_experts_per_tok", self.moe_k)
        if self.moe_layer_end_index == -1:
            self.moe_layer_end_index = self.num_hidden_layers - 1
        super().__post_init__(**others)


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer; those outside a range, and between every so-manieth one, have an MLP."""
    shape = stated_shape(config, layer)
    is_inside = config.moe_layer_start_index <= layer <= config.moe_layer_end_index
    if not is_inside or (layer + 1) % config.moe_layer_interval:
        return shape
    experts = Experts(
        count=config.moe_num_experts,
        chosen=config.moe_k,
        width=config.moe_intermediate_size,
        is_normed=True,
        has_biases=True,
        shared_width=config.moe_intermediate_size * config.moe_num_shared_experts,
    )
    return replace(shape, mlp_width=0, experts=experts)


def _why_not(config: Any) -> str | None:
    return "its layers have biases (use_bias)" if config.use_bias else None


_BIASES = "mlp.gate.moe_statics.e_score_correction_bias"
ARCHITECTURE = replace(
    ERNIE,
    model_class="Ernie4_5_MoeForCausalLM",
    config_class=Ernie45MoeFields,
    expert_parts={**expert_parts(), **PLAIN_SHARED_EXPERT},
    vectors={"expert_biases": Part(_BIASES, "exp_probs_b.bias", ("one", "experts"), only=chooses_by_biases)},
    file_names={r"\.mlp\.moe_statics\.": ".mlp.gate.moe_statics."},
    shapes=_shape,
    why_not=_why_not,
    gguf_name="ernie4_5-moe",
    gguf_experts={
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_num_shared_experts": "expert_shared_count",
    },
    gguf_sizes={
        "moe_layer_start_index": "leading_dense_block_count",
        "moe_layer_interval": "interleave_moe_layer_step",
    },
)
