"""The drafter as it is trained; `card.family.hivis.fused` has what it computes, and drafts with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from card.family.hivis.fused import HEAD_FILE, Fused, FusedFacts
from card.family.learning.bound_module import DraftingHead
from card.family.learning.head_layer import DraftLayer
from card.family.learning.layer_sizes import EPS


class FusedHead(DraftingHead):
    """The drafter: predicts a state and logits of N tokens after each row that it reads."""

    FILE, FACTS, DRAFTS_AS = HEAD_FILE, FusedFacts, Fused
    facts: FusedFacts

    def __init__(self, facts: FusedFacts, token_ids: Tensor, probe: Tensor) -> None:
        """Make a drafter with random weights from torch's present seed."""
        super().__init__(facts, token_ids, probe)
        width, size = facts.width, facts.hidden_size
        self.fuse = nn.Linear(2 * size, width, bias=False)
        self.steps = nn.Parameter(torch.zeros(facts.num_steps - 1, size))
        self.layer = DraftLayer(width)
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.state, self.word = nn.Linear(width, size), nn.Linear(width, size, bias=False)

    def own_state(self, guessed: Tensor, step: int) -> Tensor:
        """Return predicted states [..., D] as inputs of step 1 or later of a draft."""
        return guessed + self.steps[min(step, len(self.steps)) - 1] if len(self.steps) else guessed

    def read(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return rows [..., d] of states and embeddings [..., D], scaled; see `bound_module.scaled`."""
        rows: Tensor = self.fuse(torch.cat((states, embeddings), -1))
        return rows

    def guess(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions from rows [..., d] of its layer: states [..., D], and logits [..., N]."""
        x = self.norm(rows)
        return self.state(x), self.word(x) @ self._table.T
