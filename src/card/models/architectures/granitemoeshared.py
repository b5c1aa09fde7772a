"""Granite 3 and 4 with experts, and one more that all rows take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.architecture import ExpertPlace, Part, has_shared_expert
from card.models.architectures.granitemoe import ARCHITECTURE as GRANITEMOE
from card.models.architectures.mixtral import shape_of
from card.models.layer_shape import LayerShape


def _shape(config: Any, layer: int) -> LayerShape:
    """Return the shape of a layer; a width of 0 means no shared expert."""
    shape = shape_of(config, layer)
    assert shape.experts is not None
    return replace(shape, experts=replace(shape.experts, shared_width=config.shared_intermediate_size))


_DOWN: Mapping[ExpertPlace, Part] = {
    "shared_down": Part("shared_mlp.output_linear", "ffn_down_shexp", ("hidden", "shared"), only=has_shared_expert)
}
_BOTH: Mapping[ExpertPlace, Part] = {
    "shared_both": Part(
        "shared_mlp.input_linear", "ffn_gate_up_shexp", ("shared_both", "hidden"), only=has_shared_expert
    )
}
_APART: Mapping[ExpertPlace, Part] = {
    "shared_gate": Part("shared_mlp.gate_linear", "ffn_gate_shexp", ("shared", "hidden"), only=has_shared_expert),
    "shared_up": Part("shared_mlp.up_linear", "ffn_up_shexp", ("shared", "hidden"), only=has_shared_expert),
}
ARCHITECTURE = replace(
    GRANITEMOE,
    model_class="GraniteMoeSharedForCausalLM",
    expert_parts={**GRANITEMOE.expert_parts, **_BOTH, **_DOWN},
    shapes=_shape,
    gguf_expert_parts={**GRANITEMOE.expert_parts, **_APART, **_DOWN},
    gguf_joins={"shared_mlp.input_linear": ("shared_mlp.gate_linear", "shared_mlp.up_linear")},
    gguf_experts={**GRANITEMOE.gguf_experts, "shared_intermediate_size": "expert_shared_feed_forward_length"},
)
