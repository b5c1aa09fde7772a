"""A head of slots as it is trained; `card.family.ctc.slots` has what it computes, and drafts with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.family.ctc.slots import HEAD_FILE, HeadFacts, Slots
from card.family.learning.bound_module import DraftingHead
from card.family.learning.head_layer import DraftLayer
from card.models.own.head_sizes import EPS


class SlotHead(DraftingHead):
    """The head: logits of T slots over N tokens and the blank, which is the last one."""

    FILE, FACTS, DRAFTS_AS = HEAD_FILE, HeadFacts, Slots
    facts: HeadFacts

    def __init__(self, facts: HeadFacts, token_ids: Tensor, probe: Tensor) -> None:
        """Make a head with random weights from torch's present seed."""
        super().__init__(facts, token_ids, probe)
        width = facts.width
        self.read = nn.Linear(2 * facts.hidden_size, width, bias=False)
        self.places = nn.Parameter(torch.randn(facts.window, width) * width**-0.5)
        self.slots = nn.Parameter(torch.randn(facts.num_slots, width) * width**-0.5)
        self.layer = DraftLayer(width)
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.out, self.blank = nn.Linear(width, facts.hidden_size, bias=False), nn.Linear(width, 1)

    def forward(self, inputs: Tensor, is_there: Tensor) -> Tensor:
        """Return the logits of the slots, [B, T, N + 1] float32.

        Args:
            inputs: [B, W, 2 * D] of `inputs_of`, the newest row last.
            is_there: [B, W] bool; False where a text has fewer rows.
        """
        read = self.read(inputs)
        slots = self.slots + read[:, -1:]
        seen = functional.pad(is_there, (0, self.facts.num_slots), value=True)
        memory = self.layer.memory(torch.cat((read + self.places, slots), 1))
        x = self.norm(self.layer(slots, *memory, seen[:, None]))
        return torch.cat((self.out(x) @ self._table.T, self.blank(x)), -1)

    @classmethod
    def facts_of(cls, said: Mapping[str, str]) -> HeadFacts:
        """Parse the facts of a file. Raises: KeyError, ValueError if they are faulty."""
        return HeadFacts.of(said)
