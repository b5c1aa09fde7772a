"""Names of models in messages to users."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from card.models.decoder_model import LoadedModel


def model_name(model: LoadedModel) -> str:
    """Return the folder or the name that a model was loaded from; its kind if it was made otherwise."""
    return str(model.config.name_or_path or f"this {model.config.model_type} model")
