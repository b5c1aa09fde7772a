"""The text model inside a multimodal checkpoint: the names of its weights, and its config where it has an own pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from card.models.architectures import all_architectures

# Prefixes of the text model's tensors in older and newer files, in this order.
WEIGHT_NAMES: Mapping[str, str] = {
    r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head)": "model.",
    r"^(model\.)?(language_model|text_model)\.lm_head\.": "lm_head.",
}
_OTHER_PARTS = re.compile(r"^(model\.)?(visual|vision|multi_modal|audio|embed_vision|embed_audio|mm_|connector)")
_INNER, _TIED = "text_config", "tie_word_embeddings"


def inner_name(name: str) -> str | None:
    """Return the text model's name of a tensor of the checkpoint; None for a tensor of another part."""
    if _OTHER_PARTS.match(name):
        return None
    for pattern, replacement in WEIGHT_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def inner_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what config.json would have if its text model stood alone; itself if the text model has no own pass."""
    inner = raw.get(_INNER)
    entries = [entry for entry in all_architectures() if entry.outer_type == raw.get("model_type")] if inner else []
    if not entries or not isinstance(inner, Mapping):
        return raw
    others = {name: value for name, value in raw.items() if name in ("quantization_config", "auto_map")}
    dtypes = {name: raw[name] for name in ("dtype", "torch_dtype") if name in raw}
    own_dtype = any(inner.get(name) is not None for name in ("dtype", "torch_dtype"))
    tied = {_TIED: True} if raw.get(_TIED, True) else {}
    return {**({} if own_dtype else dtypes), **inner, **others, **tied, "architectures": [entries[0].model_class]}
