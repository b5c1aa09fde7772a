"""Phi-3 and Phi-4: queries, keys and values are stored as one, and heads may turn in part."""

from typing import Any

from card.models.architectures.architecture import Architecture
from card.models.decoder_config import ConfigRule
from card.models.gguf_map import GgufMap
from card.models.parts import LINEARS_WITH_GATE_UP, LINEARS_WITH_QKV_AND_GATE_UP

_PARTIAL = "partial_rotary_factor"
_OLDER_TYPES = ("su", "yarn")  # of angles with longrope's lists of factors


def _angles(config: Any, others: dict[str, Any]) -> dict[str, Any]:
    """State the angles, and which part of a head turns; returns that part with what is left of older fields."""
    stated = {_PARTIAL: others[_PARTIAL]} if _PARTIAL in others else {}
    left = config.state_angles({_PARTIAL: 1.0, **others})
    if config.rope_parameters["rope_type"] in _OLDER_TYPES:
        config.rope_parameters["rope_type"] = "longrope"
    return {**left, **stated}


ARCHITECTURE = Architecture(
    model_class="Phi3ForCausalLM",
    config=ConfigRule(angles=_angles),
    linears=LINEARS_WITH_QKV_AND_GATE_UP,
    has_windows=True,
    turns_parts=True,
    gguf=GgufMap(
        name="phi3",
        linears=LINEARS_WITH_GATE_UP,
        joins={"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    ),
)
