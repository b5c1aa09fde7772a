"""Tensors in a model's files that the model does not use: a few kinds are harmless, any other is an error.

A model without one of its scales, biases or layers would run, but write nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from card.errors import ModelError
from card.models.files.scaled_weights import is_left_aside
from card.models.files.sources import Source
from card.models.files.weight_files import is_of_drafter
from card.models.inner_text import inner_name

# Buffers that are computed.
_HARMLESS = re.compile(
    r"(^|\.)(rotary_emb|rope)\.\w*(inv_freq|cos_cached|sin_cached)$|inv_freq$|(^|\.)position_ids$"
    r"|(^|\.)attn(ention)?\.(masked_)?bias$|(^|\.)masked_bias$"
)
_HEAD = "lm_head.weight"


def check_taken(source: Source, model: Any, unexpected: Iterable[str]) -> None:
    """Raise ModelError for the first tensor that the model ignores but should use.

    Args:
        unexpected: names of ignored tensors.
    """
    config = model.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", None)
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    stray = [name for name in sorted(unexpected) if not _is_harmless(name, num_layers, is_tied=is_tied)]
    if stray:
        raise ModelError(
            f"the weights of {source.name} have {len(stray)} tensors that a {config.model_type} model does not take, "
            f"the first is {stray[0][:150]}; use the model's original folder, or a GGUF file"
        )


def _is_harmless(name: str, num_layers: object, *, is_tied: bool) -> bool:
    is_other_part = inner_name(name) is None or is_of_drafter(name, num_layers)  # a tower for images; a drafter
    return is_other_part or (is_tied and name.endswith(_HEAD)) or is_left_aside(name) or bool(_HARMLESS.search(name))
