"""The drafter as it is trained; `card.models.own.fused_head` has what it computes, and runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from card.errors import ModelError
from card.family.learning.bound_module import DraftingHead
from card.family.learning.head_layer import DraftLayer
from card.models.own.fused_head import FUSED_FILE, FUSED_TYPE, FUSED_WEIGHTS, FusedFacts
from card.models.own.head_sizes import EPS


class FusedModule(DraftingHead):
    """The drafter: predicts a state and logits of N tokens after each row that it reads."""

    FILE, FACTS = FUSED_FILE, FusedFacts
    facts: FusedFacts

    def __init__(self, facts: FusedFacts, token_ids: Tensor, probe: Tensor) -> None:
        """Make a drafter with random weights from torch's present seed."""
        super().__init__(facts, token_ids, probe)
        width, size = facts.width, facts.hidden_size
        self.fuse = nn.Linear(2 * size, width, bias=False)
        self.steps = nn.Parameter(torch.zeros(facts.num_steps - 1, size))
        self.layers = nn.ModuleList(DraftLayer(width) for _ in range(facts.num_layers))
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.state, self.word = nn.Linear(width, size), nn.Linear(width, size, bias=False)

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the folder of the drafter; config.json, which makes it one, comes last; others as of the base class."""
        folder = Path(path)
        try:
            folder.mkdir(exist_ok=True)
            super().save(folder / FUSED_WEIGHTS, figures)
            (folder / "config.json").write_text(json.dumps({"model_type": FUSED_TYPE}) + "\n", encoding="utf-8")
        except OSError as error:
            raise ModelError(f"the drafter cannot be written to {folder}: {error}") from error

    def own_state(self, guessed: Tensor, step: int) -> Tensor:
        """Return predicted states [..., D] as inputs of step 1 or later of a draft."""
        return guessed + self.steps[min(step, len(self.steps)) - 1] if len(self.steps) else guessed

    def read(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return rows [..., d] of states and embeddings [..., D], scaled; see `bound_module.scaled`."""
        rows: Tensor = self.fuse(torch.cat((states, embeddings), -1))
        return rows

    def guess(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions from rows [..., d] of its last layer: states [..., D], and logits [..., N]."""
        x = self.norm(rows)
        return self.state(x), self.word(x) @ self._table.T
