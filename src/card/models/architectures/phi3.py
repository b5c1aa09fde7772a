"""Phi-3 and Phi-4: queries, keys and values are stored as one, and heads may turn in part."""

from typing import Any

from card.models.architectures.architecture import LINEARS_WITH_GATE_UP, LINEARS_WITH_QKV_AND_GATE_UP, Architecture
from card.models.decoder_config import DecoderConfig

_PARTIAL = "partial_rotary_factor"
_OLDER_TYPES = ("su", "yarn")  # of angles with longrope's lists of factors


class Phi3Fields(DecoderConfig):
    """Its config."""

    model_type = "phi3"
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int | list[int] = 8192
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 32000
    pad_token_id: int | None = 32000

    def convert_rope_params_to_dict(self, **others: Any) -> dict[str, Any]:
        """State which part of a head turns; returns what is left of the older fields, that part among them."""
        stated = {_PARTIAL: others[_PARTIAL]} if _PARTIAL in others else {}
        left: dict[str, Any] = super().convert_rope_params_to_dict(**{_PARTIAL: 1.0, **others})
        assert self.rope_parameters is not None
        if self.rope_parameters["rope_type"] in _OLDER_TYPES:
            self.rope_parameters["rope_type"] = "longrope"
        return {**left, **stated}


ARCHITECTURE = Architecture(
    model_class="Phi3ForCausalLM",
    config_class=Phi3Fields,
    linears=LINEARS_WITH_QKV_AND_GATE_UP,
    has_windows=True,
    turns_parts=True,
    gguf_name="phi3",
    gguf_linears=LINEARS_WITH_GATE_UP,
    gguf_joins={"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
)
