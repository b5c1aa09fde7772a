"""Granite 3 and 4 with experts, and one more that all rows take."""

from collections.abc import Mapping
from dataclasses import replace

from card.models.architectures.granitemoe import ARCHITECTURE as GRANITEMOE
from card.models.architectures.mixtral import EXPERTS
from card.models.parts import ExpertPlace, Part, has_shared_expert

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
    experts=replace(EXPERTS, shared_width="shared_intermediate_size"),
    gguf=replace(
        GRANITEMOE.gguf,
        expert_parts={**GRANITEMOE.expert_parts, **_APART, **_DOWN},
        joins={"shared_mlp.input_linear": ("shared_mlp.gate_linear", "shared_mlp.up_linear")},
    ),
)
