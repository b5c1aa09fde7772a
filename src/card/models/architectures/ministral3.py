"""Ministral 3: Mistral whose angles are scaled by yarn, and whose queries grow in long texts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.mistral import ARCHITECTURE as MISTRAL
from card.models.decoder_config import DecoderConfig

_RATE, _CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings"
_GGUF_RATE = "attention.temperature_scale"


class Ministral3Fields(DecoderConfig):
    """Its config."""

    model_type = "ministral3"
    vocab_size: int = 131072
    intermediate_size: int | list[int] = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int | list[int] = 8
    head_dim: int | list[int] | None = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 11

    def __post_init__(self, **others: Any) -> None:
        """State the angles of the first models."""
        if self.rope_parameters is None:
            self.rope_parameters = {
                "type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                _CONTEXT: 16384,
                "max_position_embeddings": self.max_position_embeddings,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                _RATE: 0.1,
            }
        super().__post_init__(**others)


def _why_not(config: Any) -> str | None:
    """Return why queries do not grow as they do here; None if they do."""
    rate, length = config.rope_parameters.get(_RATE), config.rope_parameters.get(_CONTEXT)
    if isinstance(rate, int | float) and 0 <= rate < 1e6 and isinstance(length, int) and length > 0:
        return None
    return f"its queries grow by {rate} ({_RATE}) with each context of {length} ({_CONTEXT})"


def _gguf_layers(facts: Any, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the angles with the rate by which queries grow, which files of older models do not have."""
    rope = config["rope_parameters"]
    rate = facts.number(_GGUF_RATE) if facts.optional(_GGUF_RATE, 0) != 0 else 0.0
    context = rope.get(_CONTEXT, config["max_position_embeddings"])
    return {"rope_parameters": {**rope, _CONTEXT: context, _RATE: rate}}


ARCHITECTURE = replace(
    MISTRAL,
    model_class="Ministral3ForCausalLM",
    config_class=Ministral3Fields,
    query_growth=_RATE,
    why_not=_why_not,
    gguf_name="mistral3",
    gguf_pairs=True,
    gguf_keys=(_GGUF_RATE,),
    gguf_layers=_gguf_layers,
)
