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

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from card.models.head_files import EPS, HeadKind, scaled
from card.models.head_layer import DraftLayer
from card.models.torch_runner import TorchRunner

KIND = HeadKind("head", "card-hivis-1", "card train hivis")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedFacts:
    """Sizes of a drafter, and of the target that it was trained for."""

    num_steps: int  # S: steps that it was trained to make behind the newest token
    width: int  # of its layer, d
    hidden_size: int  # D of the target
    vocab_size: int  # of the target
    num_parameters: int  # of the target


class FusedHead(nn.Module):
    """The drafter: a state and logits of N tokens behind each row that it reads."""

    token_ids: Tensor
    probe: Tensor
    _table: Tensor
    _inputs: Tensor

    def __init__(self, facts: FusedFacts, token_ids: Tensor, probe: Tensor) -> None:
        """Make a drafter with weights that follow from torch's present seed.

        Args:
            token_ids: [N] int64, the target's tokens that it proposes.
            probe: of the target, see `embedding_probe`.
        """
        super().__init__()
        self.facts = facts
        width, size = facts.width, facts.hidden_size
        self.fuse = nn.Linear(2 * size, width, bias=False)
        self.steps = nn.Parameter(torch.zeros(facts.num_steps - 1, size))
        self.layer = DraftLayer(width)
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.state, self.word = nn.Linear(width, size), nn.Linear(width, size, bias=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("probe", probe, persistent=False)
        for name in ("_table", "_inputs"):
            self.register_buffer(name, torch.zeros(0, size), persistent=False)

    def attach(self, target: TorchRunner, name: str = "the drafter") -> None:
        """Take the target's embeddings. Raises: ModelError if the drafter was trained for another target."""
        KIND.require_target(name, self.facts, self.probe, target)
        self._table = target.embeddings(self.token_ids.tolist()).to(device="cpu", dtype=torch.float32).clone()
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

    @property
    def num_weights(self) -> int:
        """Number of its own weights."""
        return sum(weight.numel() for weight in self.parameters())

    # ---- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the drafter; ``figures`` tell people of its training. Raises: ModelError if that cannot be done."""
        others = {"token_ids": self.token_ids.to(torch.int32), "probe": self.probe}
        KIND.save_head(path, self, asdict(self.facts), others, figures)

    @classmethod
    def load(cls, path: str | Path) -> FusedHead:
        """Read a drafter that `save` wrote. Raises: ModelError for a file that is missing, cut off, or none."""
        return KIND.load_head(path, cls._made).requires_grad_(False)

    @classmethod
    def _made(cls, said: Mapping[str, str], tensors: dict[str, Tensor]) -> FusedHead:
        facts = FusedFacts(**{one.name: int(said[one.name]) for one in fields(FusedFacts)})
        return cls(facts, tensors.pop("token_ids").long(), tensors.pop("probe").float())
