"""A drafter that reads the text of a conversation, and what a target that sees images knows at its places.

Row i reads the target's hidden state at place i and the embedding of the token at place i + 1, through one linear
layer, and guesses state and token of the next place in one decoder layer. Places of images have no rows, and the others
are numbered without them: what an image shows is in the target's states already. Behind the newest token it reads
states that it has guessed itself, each with a learnt vector of the step, until the target's own are there.

Source: HiViS, arXiv:2509.23928, on the drafter of EAGLE, arXiv:2401.15077. Ours: the form of the steps' vectors; words
are compared with the target's embeddings, so that a file holds no vocabulary; only tokens are proposed that the target
wrote in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from card.family.learning.bound_module import EPS, DraftingHead, scaled
from card.family.learning.head_layer import DraftLayer
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes
from card.models.runner import RowRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedFacts(TargetSizes):
    """Sizes of a drafter, and of the target that it was trained for."""

    num_steps: int  # S: steps that it was trained to make behind the newest token
    width: int  # of its layer, d


class FusedHead(DraftingHead):
    """The drafter: a state and logits of N tokens behind each row that it reads."""

    FILE, FACTS = TrainedFile("head", "card-hivis-1", "card train hivis"), FusedFacts
    facts: FusedFacts
    _inputs: Tensor

    def __init__(self, facts: FusedFacts, token_ids: Tensor, probe: Tensor) -> None:
        """Make a drafter with weights that follow from torch's present seed."""
        super().__init__(facts, token_ids, probe)
        width, size = facts.width, facts.hidden_size
        self.fuse = nn.Linear(2 * size, width, bias=False)
        self.steps = nn.Parameter(torch.zeros(facts.num_steps - 1, size))
        self.layer = DraftLayer(width)
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.state, self.word = nn.Linear(width, size), nn.Linear(width, size, bias=False)
        self.register_buffer("_inputs", torch.zeros(0, size), persistent=False)

    def attach(self, target: RowRunner, name: str = "the drafter") -> None:
        """Take the target's embeddings. Raises: ModelError if the drafter was trained for another target."""
        super().attach(target, name)
        self._inputs = scaled(self._table)

    def embedded(self, labels: Tensor) -> Tensor:
        """Return the embeddings of its own tokens as it reads them, [..., D]; labels are places in `token_ids`."""
        return self._inputs[labels]

    def own_state(self, guessed: Tensor, step: int) -> Tensor:
        """Return states [..., D] that it has guessed as it reads them in step 1 or later of a draft."""
        return guessed + self.steps[min(step, len(self.steps)) - 1] if len(self.steps) else guessed

    def read(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return rows [..., d] of states and embeddings [..., D], scaled; see `head_files.scaled`."""
        rows: Tensor = self.fuse(torch.cat((states, embeddings), -1))
        return rows

    def guess(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what rows [..., d] of its layer guess: states [..., D], and logits [..., N]."""
        x = self.norm(rows)
        return self.state(x), self.word(x) @ self._table.T
