"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from dataclasses import replace
from typing import Any

from card.models.architectures.qwen2 import drop_window
from card.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from card.models.decoder_config import ConfigRule
from card.models.layer_shape import ExpertRule
from card.models.parts import expert_parts


def complete(config: Any, others: dict[str, Any]) -> None:
    """Write out that no layer is without experts, and drop a window that is switched off."""
    config.mlp_only_layers = config.mlp_only_layers or []
    drop_window(config, others)


EXPERTS = ExpertRule(enabled="num_experts", period="decoder_sparse_step", without="mlp_only_layers")
ARCHITECTURE = replace(
    QWEN3,
    model_class="Qwen3MoeForCausalLM",
    config=ConfigRule(older_names={"num_experts": "num_local_experts"}, complete=complete),
    expert_parts=expert_parts(),
    experts=EXPERTS,
    gguf=replace(QWEN3.gguf, name="qwen3moe", also="qwen3vlmoe", constants={"norm_topk_prob": True}),
)
