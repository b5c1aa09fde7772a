"""The contract of loaded models: facts that each states of itself."""

from __future__ import annotations

from typing import Any, Protocol


class LoadedModel(Protocol):
    """A model that has been loaded: a `DecoderModel`, or one of transformers'."""

    @property
    def config(self) -> Any:
        """The model's config, under transformers' names."""

    @property
    def generation_config(self) -> Any:
        """Its maker's settings of sampling, and the tokens that end a text."""

    @property
    def device(self) -> Any:
        """The device of its weights."""

    @property
    def dtype(self) -> Any:
        """The type of its weights, or of those that are no blocks."""
