"""OLMoE: experts, and norms of all queries and all keys at once."""

from typing import Any

from card.models.architectures.architecture import PRE_NORMS, WIDE_NORMS, Architecture, expert_parts
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import LayerShape, stated_shape, with_experts


def shape_of(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer, whose MLPs are the experts."""
    shape = stated_shape(config, layer)
    return with_experts(shape, config, width=shape.mlp_width)


def why_not(config: Any) -> str | None:
    """Return why a config asks for more than is built here; None if it does not."""
    return None if config.clip_qkv is None else "its queries, keys and values are clipped (clip_qkv)"


ARCHITECTURE = Architecture(
    model_class="OlmoeForCausalLM",
    config=ConfigRule(older_names={"num_experts": "num_local_experts"}),
    biases={"qkv": "attention_bias", "out": "attention_bias"},
    expert_parts=expert_parts(),
    norms={**PRE_NORMS, **WIDE_NORMS},
    shapes=shape_of,
    gguf_name="olmoe",
    gguf_experts={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    gguf_fields=lambda config: {"norm_topk_prob": False},
    why_not=why_not,
)
