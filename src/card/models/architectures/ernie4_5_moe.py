"""ERNIE 4.5 with experts, such as ERNIE-4.5-21B-A3B: biases count for the choice of experts alone."""

from dataclasses import replace
from typing import Any

from card.models.architectures.ernie4_5 import ARCHITECTURE as ERNIE
from card.models.architectures.glm4_moe import PLAIN_SHARED_EXPERT
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import ExpertRule
from card.models.parts import expert_biases, expert_parts


def _complete(config: Any, others: dict[str, Any]) -> None:
    """State which layer is the last one with experts."""
    if config.moe_layer_end_index == -1:
        config.moe_layer_end_index = config.num_hidden_layers - 1


ARCHITECTURE = replace(
    ERNIE,
    model_class="Ernie4_5_MoeForCausalLM",
    config=ConfigRule(
        older_names={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}, complete=_complete
    ),
    expert_parts={**expert_parts(), **PLAIN_SHARED_EXPERT},
    vectors=expert_biases("mlp.gate.moe_statics.e_score_correction_bias", "one", "experts"),
    file_names={r"\.mlp\.moe_statics\.": ".mlp.gate.moe_statics."},
    experts=ExpertRule(
        count="moe_num_experts",
        chosen="moe_k",
        is_normed=True,
        has_biases=True,
        shared="moe_num_shared_experts",
        first="moe_layer_start_index",
        last="moe_layer_end_index",
        period="moe_layer_interval",
    ),
    unbuilt={"use_bias": "its layers have biases"},
    gguf=replace(ERNIE.gguf, name="ernie4_5-moe", sizes={"moe_layer_interval": "interleave_moe_layer_step"}),
)
