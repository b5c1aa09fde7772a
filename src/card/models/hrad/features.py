"""Features of a row: the hidden states after the last layers, for predictors that look at what the target thinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from card.errors import ModelError
from card.models.inflation import OriginalSize


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Which hidden states make the features of a row.

    They are the last ones of transformers' ``output_hidden_states``: the residual stream after each of ``layers``, and
    after the final norm. An inflated model repeats its original's stream and adds layers that change nothing, so the
    first ``width`` entries after the original's layers are the original's features.
    """

    layers: tuple[int, ...]  # of the model that runs, counted from 0; the original's last one is read after the norm
    width: int  # D of the original

    @property
    def num_features(self) -> int:
        """Length of a row's features."""
        return (len(self.layers) + 1) * self.width

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Return [rows, num_features]: the states after ``layers`` and after the norm, each [rows, D or more]."""
        return torch.cat([state[:, : self.width] for state in states], -1)


def kept_states(original: OriginalSize, num_layers: int) -> KeptStates:
    """Return what to keep for features of the last ``num_layers`` layers. Raises: ModelError if there are fewer."""
    if not 1 <= num_layers <= original.num_layers:
        raise ModelError(
            f"features are the hidden states of the last 1 to {original.num_layers} layers of this model, got"
            f" {num_layers}; ask for fewer layers"
        )
    return KeptStates(tuple(range(original.num_layers - num_layers, original.num_layers - 1)), original.hidden_size)
