"""A layer through which a drafter reads the hidden states of one target: it is refused for any other target.

A token's embedding gets an addition from the states from which the target chose the token: the states of each layer
scaled to a mean square of 1, then one linear layer over all of them, times a small number. Nothing is added to the
first token of a text, to tokens that the target has not read yet, and to masks.

Source: PARD-2, arXiv:2605.08632, of which only the layers and the number are known. Ours: the scaling, and the layers
of a target with fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from card.backends.transformers.arrays import as_array, as_tensor
from card.family.learning.bound_module import BoundModule
from card.kernels.number_types import Floats
from card.models.facts import embeddings_of, vocab_size
from card.models.features import FeatureWish
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes, probed_tokens, target_difference
from card.models.inflation import original_size
from card.models.loaded_model import LoadedModel
from card.models.own.head_sizes import EPS
from card.models.runner import RowRunner
from card.tree.logits import FloatArray

SCALE = 0.02
_PUBLISHED_LAYERS = (-1, -8, -16, -24)


def read_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers of a target to read, counted as in `FeatureWish`: the published ones if it has them all.

    In a target with fewer layers they are a quarter of its depth apart.
    """
    if num_layers >= -_PUBLISHED_LAYERS[-1]:
        return _PUBLISHED_LAYERS
    quarters = (-1, *(-round(num_layers * part / 4) for part in (1, 2, 3)))
    return tuple(dict.fromkeys(min(-1, layer) for layer in quarters))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts(TargetSizes):
    """Sizes of the target and of the drafter that reads it."""

    num_layers: int  # of the target
    width: int  # of the drafter's embeddings, d


class StateInput(BoundModule):
    """A linear layer from states of the target to an embedding of the draft model."""

    FILE = TrainedFile("layer for target features", "card-pard-features-1", "card train pard --target-features")
    FACTS = StateFacts
    facts: StateFacts

    def __init__(self, facts: StateFacts, probe: Tensor, *, seed: int = 0) -> None:
        """Make a layer with random weights from a seed.

        Args:
            probe: of the target, see `embedding_probe`.
        """
        super().__init__(facts, probe)
        self.layers = read_layers(facts.num_layers)
        num_inputs = len(self.layers) * facts.hidden_size
        self.fuse = nn.Linear(num_inputs, facts.width, bias=False)
        nn.init.normal_(self.fuse.weight, std=num_inputs**-0.5, generator=torch.Generator().manual_seed(seed))

    @property
    def wish(self) -> FeatureWish:
        """The states that the layer reads."""
        return FeatureWish(self.layers, "all")

    @classmethod
    def for_target(cls, target: LoadedModel, width: int, *, seed: int = 0) -> Self:
        """Return a new layer for a target and a drafter of this width."""
        size, num_tokens = original_size(target), vocab_size(target)
        facts = StateFacts(
            hidden_size=size.hidden_size,
            vocab_size=num_tokens,
            num_parameters=size.num_parameters,
            num_layers=size.num_layers,
            width=width,
        )
        rows = embeddings_of(target, probed_tokens(num_tokens))[:, : size.hidden_size]
        return cls(facts, as_tensor(rows.ravel()), seed=seed)

    def forward(self, states: Tensor) -> Tensor:
        """Return the addition to embeddings, [..., d] float32, from states [..., layers * D] of any floating dtype."""
        size = self.facts.hidden_size
        of_layers = states.float().reshape(*states.shape[:-1], len(self.layers), size)
        added: Tensor = SCALE * self.fuse(functional.rms_norm(of_layers, (size,), eps=EPS).flatten(-2))
        return added

    def added_by(self, states: FloatArray) -> Floats:
        """Return `forward` of states [n, layers * D] as an array."""
        with torch.inference_mode():
            added: Floats = as_array(self(as_tensor(np.ascontiguousarray(states))))
        return added

    def check(self, target: RowRunner, width: int, name: str) -> None:
        """Raise ModelError unless the layer was trained for this target and a drafter of this width."""
        known, made_for = self.facts, "target"
        difference = target_difference(known, target, as_array(self.probe))
        if known.num_layers != target.original.num_layers:
            difference = f"its target has {known.num_layers} layers, this one {target.original.num_layers}"
        elif known.width != width:
            made_for, difference = "drafter", f"it has width {known.width}, this one {width}"
        advice = (
            f"adapt the draft model for this target with {self.FILE.command}, or for all of its family without target"
        )
        self.FILE.check_made_for(made_for, name, difference, f"{advice} features")
