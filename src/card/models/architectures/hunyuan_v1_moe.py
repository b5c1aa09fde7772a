"""Hunyuan with experts, such as Hunyuan-A13B, and one more that all rows take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import ExpertPlace, Part, expert_parts
from card.models.architectures.hunyuan_v1_dense import ARCHITECTURE as DENSE
from card.models.layer_shape import Experts, LayerShape, of_layer, stated_shape


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer, whose MLPs are the experts."""
    shape = stated_shape(config, layer)
    experts = Experts(
        count=config.num_experts,
        chosen=of_layer(config.moe_topk, layer),
        width=shape.mlp_width,
        is_normed=True,
        shared_width=shape.mlp_width,
    )
    return replace(shape, mlp_width=0, experts=experts)


_SHARED: Mapping[ExpertPlace, Part] = {
    "shared_gate": Part("mlp.shared_mlp.gate_proj", "ffn_gate_shexp", ("shared", "hidden")),
    "shared_up": Part("mlp.shared_mlp.up_proj", "ffn_up_shexp", ("shared", "hidden")),
    "shared_down": Part("mlp.shared_mlp.down_proj", "ffn_down_shexp", ("hidden", "shared")),
}
ARCHITECTURE = replace(
    DENSE,
    model_class="HunYuanMoEV1ForCausalLM",
    expert_parts={**expert_parts(router="gate.wg"), **_SHARED},
    shapes=_shape,
    gguf_name="hunyuan-moe",
    gguf_experts={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
)
