"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from dataclasses import replace

from card.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from card.models.layer_shape import ExpertRule
from card.models.parts import expert_parts

EXPERTS = ExpertRule(enabled="num_experts", period="decoder_sparse_step", without="mlp_only_layers")
ARCHITECTURE = replace(
    QWEN3,
    model_class="Qwen3MoeForCausalLM",
    config=replace(QWEN3.config, older_names={"num_experts": "num_local_experts"}, filled={"mlp_only_layers": []}),
    expert_parts=expert_parts(),
    experts=EXPERTS,
    gguf=replace(QWEN3.gguf, name="qwen3moe", also="qwen3vlmoe", constants={"norm_topk_prob": True}),
)
