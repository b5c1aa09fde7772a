"""Qwen1.5 and Qwen2 with experts, and one more that all rows take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.architectures.qwen3_moe import EXPERTS
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import ExpertPlace, Part, expert_parts


def _complete(config: Any, others: dict[str, Any]) -> None:
    """Write the kind of each layer out; a window that is switched off is 0 there."""
    if not config.use_sliding_window:
        config.layer_types = config.layer_types or ["full_attention"] * config.num_hidden_layers
        config.sliding_window = 0


SHARED_EXPERT: Mapping[ExpertPlace, Part] = {
    "shared_gate": Part("mlp.shared_expert.gate_proj", "ffn_gate_shexp", ("shared", "hidden")),
    "shared_up": Part("mlp.shared_expert.up_proj", "ffn_up_shexp", ("shared", "hidden")),
    "shared_down": Part("mlp.shared_expert.down_proj", "ffn_down_shexp", ("hidden", "shared")),
    "shared_score": Part("mlp.shared_expert_gate", "ffn_gate_inp_shexp", ("one", "hidden")),
}
ARCHITECTURE = Architecture(
    model_class="Qwen2MoeForCausalLM",
    config=ConfigRule(filled={"mlp_only_layers": []}, complete=_complete),
    biases={"qkv": "qkv_bias"},
    expert_parts={**expert_parts(), **SHARED_EXPERT},
    experts=replace(EXPERTS, shared_width="shared_expert_intermediate_size", has_shared_gate=True),
    gguf=GgufMap(name="qwen2moe", constants={"norm_topk_prob": False}),
)
