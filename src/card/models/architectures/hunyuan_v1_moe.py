"""Hunyuan with experts, such as Hunyuan-A13B, and one more that all rows take."""

from collections.abc import Mapping
from dataclasses import replace

from card.models.architectures.hunyuan_v1_dense import ARCHITECTURE as DENSE
from card.models.layer_shape import ExpertRule
from card.models.parts import ExpertPlace, Part, expert_parts

_SHARED: Mapping[ExpertPlace, Part] = {
    "shared_gate": Part("mlp.shared_mlp.gate_proj", "ffn_gate_shexp", ("shared", "hidden")),
    "shared_up": Part("mlp.shared_mlp.up_proj", "ffn_up_shexp", ("shared", "hidden")),
    "shared_down": Part("mlp.shared_mlp.down_proj", "ffn_down_shexp", ("hidden", "shared")),
}
ARCHITECTURE = replace(
    DENSE,
    model_class="HunYuanMoEV1ForCausalLM",
    expert_parts={**expert_parts(router="gate.wg"), **_SHARED},
    experts=ExpertRule(chosen="moe_topk", width="intermediate_size", is_normed=True, shared_width="intermediate_size"),
    gguf=replace(DENSE.gguf, name="hunyuan-moe"),
)
