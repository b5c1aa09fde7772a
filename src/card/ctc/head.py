"""A head that drafts from the target's hidden states: T slots, each a distribution over tokens and a blank.

A slot reads the last rows of the text, each a hidden state and the embedding of the token that came of it, and the
other slots, in one decoder layer. Its output is compared with the target's own embeddings, so that a file holds no
vocabulary. Only tokens that the target wrote in training are proposed.

Source: CTC-drafter, Wen et al. 2024, arXiv:2412.00061. Ours: the blank is no token of the target's, all slots are made
in one pass, and the same head is trained by cross-entropy, slot by slot, as Medusa's are (arXiv:2401.10774).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.ctc.names import LOSSES, Loss
from card.models.head_files import EPS, HeadKind
from card.models.head_layer import DraftLayer
from card.models.torch_runner import TorchRunner

KIND = HeadKind("head", "card-ctc-1", "card train ctc")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Sizes of a head, and what it was trained for."""

    loss: Loss
    num_slots: int  # T
    window: int  # rows of the text that a slot reads, W
    width: int  # of its layer, d
    hidden_size: int  # D of the target
    vocab_size: int  # of the target
    num_parameters: int  # of the target


class SlotHead(nn.Module):
    """The head: logits of T slots over N tokens and the blank, which is the last one."""

    token_ids: Tensor
    probe: Tensor
    _table: Tensor

    def __init__(self, facts: HeadFacts, token_ids: Tensor, probe: Tensor) -> None:
        """Make a head with weights that follow from torch's present seed.

        Args:
            token_ids: [N] int64, the target's tokens that it proposes.
            probe: of the target, see `embedding_probe`.
        """
        super().__init__()
        self.facts = facts
        width = facts.width
        self.read = nn.Linear(2 * facts.hidden_size, width, bias=False)
        self.places = nn.Parameter(torch.randn(facts.window, width) * width**-0.5)
        self.slots = nn.Parameter(torch.randn(facts.num_slots, width) * width**-0.5)
        self.layer = DraftLayer(width)
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.out, self.blank = nn.Linear(width, facts.hidden_size, bias=False), nn.Linear(width, 1)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("probe", probe, persistent=False)
        self.register_buffer("_table", torch.zeros(0, facts.hidden_size), persistent=False)

    def attach(self, target: TorchRunner, name: str = "the head") -> None:
        """Take the target's embeddings. Raises: ModelError if the head was trained for another target."""
        KIND.require_target(name, self.facts, self.probe, target)
        self._table = target.embeddings(self.token_ids.tolist()).to(device="cpu", dtype=torch.float32).clone()

    def forward(self, inputs: Tensor, is_there: Tensor) -> Tensor:
        """Return the logits of the slots, [B, T, N + 1] float32.

        Args:
            inputs: [B, W, 2 * D] of `inputs_of`, the newest row last.
            is_there: [B, W] bool; False where a text has not so many rows.
        """
        read = self.read(inputs)
        slots = self.slots + read[:, -1:]
        seen = functional.pad(is_there, (0, self.facts.num_slots), value=True)
        memory = self.layer.memory(torch.cat((read + self.places, slots), 1))
        x = self.norm(self.layer(slots, *memory, seen[:, None]))
        return torch.cat((self.out(x) @ self._table.T, self.blank(x)), -1)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return log-probabilities of the slots, as `forward` has them; without CTC no slot is blank."""
        if self.facts.loss == "ctc":
            return logits.log_softmax(-1)
        return functional.pad(logits[..., :-1].log_softmax(-1), (0, 1), value=-math.inf)

    @property
    def num_weights(self) -> int:
        """Number of its own weights."""
        return sum(weight.numel() for weight in self.parameters())

    # ---- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the head; ``figures`` tell people of its training. Raises: ModelError if the file cannot be written."""
        others = {"token_ids": self.token_ids.to(torch.int32), "probe": self.probe}
        KIND.save_head(path, self, asdict(self.facts), others, figures)

    @classmethod
    def load(cls, path: str | Path) -> SlotHead:
        """Read a head that `save` wrote. Raises: ModelError for a file that is missing, cut off, or no head."""
        return KIND.load_head(path, cls._made)

    @classmethod
    def _made(cls, said: Mapping[str, str], tensors: dict[str, Tensor]) -> SlotHead:
        facts: dict[str, Any] = {one.name: int(said[one.name]) for one in fields(HeadFacts)[1:]}
        loss: Any = said["loss"]
        if loss not in LOSSES:
            raise ValueError(f"loss {loss!r}")
        return cls(HeadFacts(loss=loss, **facts), tensors.pop("token_ids").long(), tensors.pop("probe").float())
