"""A drafter that reads the text of a conversation, and the hidden states of a target that sees images, as it drafts.

Row i reads the target's hidden state at place i and the embedding of the token at place i + 1, through one linear
layer. One decoder layer then predicts state and token of the next place. Places of images have no rows and are not
numbered: the target's states already hold what an image shows. After the newest token the drafter reads states of its
own prediction, each with a learnt vector of the step, until the target's states replace them.

Source: HiViS, arXiv:2509.23928, on the drafter of EAGLE, arXiv:2401.15077. Ours: the form of the steps' vectors; output
is compared with the target's embeddings, so that a file holds no vocabulary; only tokens that the target wrote in
training are proposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from card.family.learning.array_head import ArrayHead, layer_shapes, scaled_rows
from card.family.learning.layer_sizes import EPS
from card.kernels.number_types import Array, Floats
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes
from card.models.own.exact_layers import rms_norm
from card.models.rows.row_tree import IntArray
from card.models.runner import RowRunner

HEAD_FILE = TrainedFile("head", "card-hivis-1", "card train hivis")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedFacts(TargetSizes):
    """Sizes of a drafter and of its target."""

    num_steps: int  # S: steps after the newest token in training
    width: int  # of its layer, d

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight by its name."""
        d, size = self.width, self.hidden_size
        return {
            "fuse.weight": (d, 2 * size),
            "steps": (self.num_steps - 1, size),
            **layer_shapes(d),
            "norm.weight": (d,),
            "state.weight": (size, d),
            "state.bias": (size,),
            "word.weight": (size, d),
        }


class Fused(ArrayHead):
    """The drafter of a file: predicts a state and logits of N tokens after each row that it reads."""

    FILE = HEAD_FILE
    facts: FusedFacts

    def __init__(self, facts: FusedFacts, arrays: Mapping[str, Array], table: Floats | None = None) -> None:
        """Take over a file's arrays; arguments and errors as of `ArrayHead`."""
        super().__init__(facts, arrays, table)
        self._inputs = scaled_rows(self._table)

    @classmethod
    def of(cls, said: Mapping[str, str], arrays: Mapping[str, Array], table: Floats | None = None) -> Fused:
        """Make a drafter of what its file says; arguments and errors as of `ArrayHead.of`."""
        return cls(FusedFacts(**{one.name: int(said[one.name]) for one in fields(FusedFacts)}), arrays, table)

    def attach(self, target: RowRunner, name: str) -> None:
        """Use the target's embeddings. Raises: ModelError if the drafter was trained for another target."""
        super().attach(target, name)
        self._inputs = scaled_rows(self._table)

    def embedded(self, labels: IntArray) -> Floats:
        """Return its input embeddings of tokens, [..., D]; labels are places in `token_ids`."""
        return self._inputs[labels]

    def own_state(self, guessed: Floats, step: int) -> Floats:
        """Return predicted states [..., D] as inputs of step 1 or later of a draft."""
        steps = self._weights["steps"]
        return guessed + steps[min(step, len(steps)) - 1] if len(steps) else guessed

    def read(self, states: Floats, embeddings: Floats) -> Floats:
        """Return rows [..., d] of states and embeddings [..., D], scaled; see `scaled_rows`."""
        rows: Floats = np.concatenate([states, embeddings], -1) @ self._weights["fuse.weight"].T
        return rows

    def guess(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return predictions from rows [..., d] of its layer: states [..., D], and logits [..., N]."""
        weights = self._weights
        x = rms_norm(rows, weights["norm.weight"], EPS)
        states: Floats = x @ weights["state.weight"].T + weights["state.bias"]
        words: Floats = x @ weights["word.weight"].T
        logits: Floats = words @ self._table.T
        return states, logits
