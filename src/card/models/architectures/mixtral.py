"""Mixtral."""

from card.models.architectures.architecture import Architecture
from card.models.gguf_map import GgufMap
from card.models.layer_shape import ExpertRule
from card.models.parts import expert_parts

EXPERTS = ExpertRule(count="num_local_experts", width="intermediate_size", is_normed=True)
ARCHITECTURE = Architecture(
    model_class="MixtralForCausalLM",
    expert_parts=expert_parts(),
    file_names={
        ".block_sparse_moe.": ".mlp.",
        ".w1.weight": ".gate_proj.weight",
        ".w2.weight": ".down_proj.weight",
        ".w3.weight": ".up_proj.weight",
    },
    has_windows=True,
    experts=EXPERTS,
    gguf=GgufMap(name="llama", pairs=True),
)
