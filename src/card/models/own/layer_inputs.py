"""Numbers that a token has for each layer alone, besides its embedding: their table, and what makes more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from card.kernels.number_types import Array
from card.models.architectures import Architecture
from card.models.own.layers import Linear, Weight

LAYER_TABLE = "model.embed_tokens_per_layer.weight"
_PROJECTION, _NORM = "model.per_layer_model_projection.weight", "model.per_layer_projection_norm.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """The parts of a model that make them: P numbers for each of L layers."""

    table: Weight  # [V, L * P]; rows are read where they are stored
    projection: Linear  # [L * P, D], of the embedding
    norm: Array  # [P], of what the projection gives to a layer

    @property
    def width(self) -> int:
        """P."""
        return len(self.norm)

    @property
    def packed_weights(self) -> Iterator[tuple[str, Weight]]:
        """Those that a pass reads as a whole."""
        yield _NORM, self.norm
        yield _PROJECTION, self.projection.weight

    @property
    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Its weights by transformers' names."""
        yield from self.packed_weights
        yield LAYER_TABLE, self.table


def layer_inputs_of(architecture: Architecture, config: Any, take: Callable[..., Weight]) -> LayerInputs | None:
    """Return what a model has of them; None if it has none.

    Args:
        take: gives a weight by its name, of a shape.
    """
    width = 0 if architecture.layer_inputs is None else int(getattr(config, architecture.layer_inputs))
    if width == 0:
        return None
    channels = config.num_hidden_layers * width
    return LayerInputs(
        take(LAYER_TABLE, config.vocab_size_per_layer_input, channels),
        Linear(take(_PROJECTION, channels, config.hidden_size)),
        cast(Array, take(_NORM, width)),
    )
