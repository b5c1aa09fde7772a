"""LFM2 with experts, such as LFM2-8B-A1B: short convolutions, and experts behind a router of sigmoids."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Part, chooses_by_biases, expert_parts
from card.models.architectures.lfm2 import ARCHITECTURE as LFM2
from card.models.decoder_config import DecoderConfig
from card.models.layer_shape import Experts, LayerShape, stated_shape


class Lfm2MoeFields(DecoderConfig):
    """Its config."""

    model_type = "lfm2_moe"
    default_theta = 1_000_000.0
    vocab_size: int = 65536
    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128_000
    norm_eps: float = 0.00001
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = 3  # taps
    num_dense_layers: int = 2
    num_experts_per_tok: int = 4
    num_experts: int = 32
    output_router_logits: bool = False
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True

    def __post_init__(self, **others: Any) -> None:
        """Read the older name of a field."""
        self.tie_word_embeddings = others.pop("tie_embedding", self.tie_word_embeddings)
        super().__post_init__(**others)


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = stated_shape(config, layer)
    if config.layer_types[layer] == "conv":
        shape = replace(shape, mixer="short_conv", num_taps=config.conv_L_cache)
    if layer < config.num_dense_layers:
        return shape
    experts = Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        is_normed=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        has_sigmoids=True,
        sum_offset=1e-6,
        has_biases=config.use_expert_bias,
    )
    return replace(shape, mlp_width=0, experts=experts)


ARCHITECTURE = replace(
    LFM2,
    model_class="Lfm2MoeForCausalLM",
    config_class=Lfm2MoeFields,
    expert_parts=expert_parts("feed_forward"),
    vectors={
        "expert_biases": Part("feed_forward.expert_bias", "exp_probs_b.bias", ("experts",), only=chooses_by_biases)
    },
    file_names={
        rf"(\.experts\.\d+)\.{theirs}\.": rf"\1.{own}_proj."
        for theirs, own in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    rotary="pos_emb",
    shapes=_shape,
    gguf_name="lfm2moe",
    gguf_has_sigmoids=True,
    gguf_experts={
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    gguf_sizes={**LFM2.gguf_sizes, "num_dense_layers": "leading_dense_block_count"},
    gguf_fields=lambda config: {},
)
