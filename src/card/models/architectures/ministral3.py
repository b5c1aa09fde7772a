"""Ministral 3: Mistral whose angles are scaled by yarn, and whose queries grow in long texts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from card.models.architectures.mistral import ARCHITECTURE as MISTRAL
from card.models.decoder_config import ConfigRule

_RATE, _CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings"
_GGUF_RATE = "attention.temperature_scale"


def _complete(config: Any, others: dict[str, Any]) -> None:
    """State the angles of the first models."""
    if config.rope_parameters is None:
        config.rope_parameters = {
            "type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            _CONTEXT: 16384,
            "max_position_embeddings": config.max_position_embeddings,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            _RATE: 0.1,
        }


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
    config=ConfigRule(complete=_complete),
    query_growth=_RATE,
    why_not=_why_not,
    gguf=replace(MISTRAL.gguf, name="mistral3", pairs=True, keys=(_GGUF_RATE,), layers=_gguf_layers),
)
