"""LFM2 with experts, such as LFM2-8B-A1B: short convolutions, and experts behind a router of sigmoids."""

from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Part, chooses_by_biases, expert_parts
from card.models.architectures.lfm2 import ARCHITECTURE as LFM2
from card.models.architectures.lfm2 import mixed_shape
from card.models.architectures.qwen3_moe import GGUF_EXPERTS
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import LayerShape, with_experts


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer."""
    shape = mixed_shape(config, layer)
    if layer < config.num_dense_layers:
        return shape
    return with_experts(
        shape,
        config,
        scale=config.routed_scaling_factor,
        has_sigmoids=True,
        sum_offset=1e-6,
        has_biases=config.use_expert_bias,
    )


ARCHITECTURE = replace(
    LFM2,
    model_class="Lfm2MoeForCausalLM",
    config=ConfigRule(older_names={"tie_word_embeddings": "tie_embedding"}),
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
    gguf_experts=GGUF_EXPERTS,
    gguf_sizes={**LFM2.gguf_sizes, "num_dense_layers": "leading_dense_block_count"},
    gguf_fields=lambda config: {},
)
