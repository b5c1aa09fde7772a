"""OLMoE: experts, and norms of all queries and all keys at once."""

from typing import Any

from card.models.architectures.architecture import PRE_NORMS, WIDE_NORMS, Architecture, expert_parts
from card.models.decoder_config import RoutedConfig
from card.models.layer_shape import LayerShape, stated_shape, with_experts


class OlmoeFields(RoutedConfig):
    """Its config, with two names for the number of experts."""

    model_type = "olmoe"
    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts_per_tok: int = 8
    num_experts: int = 64
    router_aux_loss_coef: float = 0.01
    norm_topk_prob: bool = False

    def __post_init__(self, **others: Any) -> None:
        """Take the number of experts under its other name."""
        self.num_experts = others.pop("num_local_experts", self.num_experts)
        super().__post_init__(**others)


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer, whose MLPs are the experts."""
    shape = stated_shape(config, layer)
    return with_experts(shape, config, width=shape.mlp_width)


def why_not(config: Any) -> str | None:
    """Return why a config asks for more than is built here; None if it does not."""
    return None if config.clip_qkv is None else "its queries, keys and values are clipped (clip_qkv)"


ARCHITECTURE = Architecture(
    model_class="OlmoeForCausalLM",
    config_class=OlmoeFields,
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    expert_parts=expert_parts(),
    norms={**PRE_NORMS, **WIDE_NORMS},
    shapes=shape_of,
    gguf_name="olmoe",
    gguf_experts={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    gguf_fields=lambda config: {"norm_topk_prob": False},
    why_not=why_not,
)
