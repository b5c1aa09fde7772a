"""A head that drafts from the target's hidden states: T slots, each a distribution over tokens and a blank.

In one decoder layer, a slot reads the other slots and the last rows of the text: each row is a hidden state with the
embedding of the token chosen from it. The output is compared with the target's own embeddings, so that a file holds no
vocabulary. The head proposes only tokens that the target wrote in training.

Source: CTC-drafter, Wen et al. 2024, arXiv:2412.00061. Ours: the blank is no token of the target's, one pass
makes all slots, and the same head can be trained by cross-entropy per slot, like Medusa's heads (arXiv:2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.family.ctc.losses import LOSSES, Loss
from card.family.learning.bound_module import EPS, DraftingHead
from card.family.learning.head_layer import DraftLayer
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts(TargetSizes):
    """Sizes of a head, and the facts of its training."""

    loss: Loss
    num_slots: int  # T
    window: int  # rows of the text that a slot reads, W
    width: int  # of its layer, d


class SlotHead(DraftingHead):
    """The head: logits of T slots over N tokens and the blank, which is the last one."""

    FILE, FACTS = TrainedFile("head", "card-ctc-1", "card train ctc"), HeadFacts
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

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities of the slots, from logits of `forward`; without CTC no slot is blank."""
        if self.facts.loss == "ctc":
            return logits.log_softmax(-1)
        return functional.pad(logits[..., :-1].log_softmax(-1), (0, 1), value=-math.inf)

    @classmethod
    def facts_of(cls, said: Mapping[str, str]) -> HeadFacts:
        """Parse the facts of a file. Raises: KeyError, ValueError if they are faulty."""
        loss: Any = said["loss"]
        if loss not in LOSSES:
            raise ValueError(f"loss {loss!r}")
        return HeadFacts(
            loss=loss, **{one.name: int(said[one.name]) for one in fields(HeadFacts) if one.name != "loss"}
        )
