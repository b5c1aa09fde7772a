"""The text model inside a multimodal checkpoint: its config, and what its weights are called there.

Towers for images and sound are not loaded. On text alone such a model computes what a text model with these weights
does: angles that are stated for time, height and width are those of the position where all three are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedConfig

# Text models that transformers has no class of their own for, and what they are on text alone.
_KINDS: Mapping[str, str] = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# How tensors of the text model are called, in files of several ages; in this order.
WEIGHT_NAMES: Mapping[str, str] = {
    r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head)": "model.",
    r"^(model\.)?(language_model|text_model)\.lm_head\.": "lm_head.",
}
TURNS_BY_AXES = "turns_by_axes"  # mark on a config: rows of an image turn by time, height and width
_OTHER_PARTS = re.compile(r"^(model\.)?(visual|vision|multi_modal|audio|embed_vision|embed_audio|mm_|connector)")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the text model inside; None if there is nothing else in the checkpoint, or no such model."""
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


def inner_name(name: str) -> str | None:
    """Return what the text model calls a tensor of the checkpoint; None for one of another part."""
    if _OTHER_PARTS.match(name):
        return None
    for pattern, replacement in WEIGHT_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


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
