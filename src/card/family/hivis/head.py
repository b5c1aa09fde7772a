"""A drafter that reads the text of a conversation, and the hidden states of a target that sees images.

Row i reads the target's hidden state at place i and the embedding of the token at place i + 1, through one linear
layer. One decoder layer then predicts state and token of the next place. Places of images have no rows and are not
numbered: the target's states already hold what an image shows. After the newest token the drafter reads states of its
own prediction, each with a learnt vector of the step, until the target's states replace them.

Source: HiViS, arXiv:2509.23928, on the drafter of EAGLE, arXiv:2401.15077. Ours: the form of the steps' vectors; output
is compared with the target's embeddings, so that a file holds no vocabulary; only tokens that the target wrote in
training are proposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from card.family.learning.bound_module import DraftingHead, scaled
from card.family.learning.head_layer import DraftLayer
from card.family.learning.layer_sizes import EPS
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes
from card.models.runner import RowRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedFacts(TargetSizes):
    """Sizes of a drafter and of its target."""

    num_steps: int  # S: steps after the newest token in training
    width: int  # of its layer, d


class FusedHead(DraftingHead):
    """The drafter: predicts a state and logits of N tokens after each row that it reads."""

    FILE, FACTS = TrainedFile("head", "card-hivis-1", "card train hivis"), FusedFacts
    facts: FusedFacts
    _inputs: Tensor

    def __init__(self, facts: FusedFacts, token_ids: Tensor, probe: Tensor) -> None:
        """Make a drafter with random weights from torch's present seed."""
        super().__init__(facts, token_ids, probe)
        width, size = facts.width, facts.hidden_size
        self.fuse = nn.Linear(2 * size, width, bias=False)
        self.steps = nn.Parameter(torch.zeros(facts.num_steps - 1, size))
        self.layer = DraftLayer(width)
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.state, self.word = nn.Linear(width, size), nn.Linear(width, size, bias=False)
        self.register_buffer("_inputs", torch.zeros(0, size), persistent=False)

    def attach(self, target: RowRunner, name: str = "the drafter") -> None:
        """Use the target's embeddings. Raises: ModelError if the drafter was trained for another target."""
        super().attach(target, name)
        self._inputs = scaled(self._table)

    def embedded(self, labels: Tensor) -> Tensor:
        """Return its input embeddings of tokens, [..., D]; labels are places in `token_ids`."""
        return self._inputs[labels]

    def own_state(self, guessed: Tensor, step: int) -> Tensor:
        """Return predicted states [..., D] as inputs of step 1 or later of a draft."""
        return guessed + self.steps[min(step, len(self.steps)) - 1] if len(self.steps) else guessed

    def read(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return rows [..., d] of states and embeddings [..., D], scaled; see `head_files.scaled`."""
        rows: Tensor = self.fuse(torch.cat((states, embeddings), -1))
        return rows

    def guess(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions from rows [..., d] of its layer: states [..., D], and logits [..., N]."""
        x = self.norm(rows)
        return self.state(x), self.word(x) @ self._table.T
