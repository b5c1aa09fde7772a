"""The config of the text model inside a multimodal checkpoint, as transformers has it.

Towers for images and sound are not loaded. On text such a model computes the same as a text model with these weights:
angles for time, height and width are those of the position if all three are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig

# Text models without a class in transformers, and the equivalent models on text.
_KINDS: Mapping[str, str] = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
TURNS_BY_AXES = "turns_by_axes"  # mark on a config: rows of an image are rotated by time, height and width


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the text model inside; None if the checkpoint is a plain text model, or has none."""
    inner = config.get_text_config()
    if inner is config or getattr(config, "is_encoder_decoder", False):
        return None
    kind = _KINDS.get(inner.model_type)
    if kind is not None:
        inner = _as_kind(inner, kind)
    if type(inner) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if config.tie_word_embeddings:
        inner.tie_word_embeddings = True
    return inner


def _as_kind(inner: PreTrainedConfig, kind: str) -> PreTrainedConfig:
    facts: dict[str, Any] = {name: value for name, value in inner.to_dict().items() if name != "model_type"}
    rope = dict(facts.get("rope_parameters") or {})
    if rope.get("rope_type", "default") in ("default", "mrope"):
        facts["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    else:
        facts["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    made: PreTrainedConfig = transformers.AutoConfig.for_model(kind, **facts)
    setattr(made, TURNS_BY_AXES, True)
    return made
