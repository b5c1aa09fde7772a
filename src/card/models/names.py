"""Names of models in messages to users, and what to use instead of one that cannot run."""

from __future__ import annotations

from card.models.loaded_model import LoadedModel

OWN_BLOCK = "mtp"  # as the name of a draft model: the block that drafts inside the target's own checkpoint
OTHER_FAMILY = "choose a model of another family, such as Llama, Mistral, Qwen, Gemma, Phi or OLMo"


def model_name(model: LoadedModel) -> str:
    """Return the folder or the name that a model was loaded from; its kind if it was made otherwise."""
    return str(getattr(model.config, "name_or_path", "") or f"this {model.config.model_type} model")
