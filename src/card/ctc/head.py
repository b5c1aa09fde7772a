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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from card.ctc.names import LOSSES, Loss
from card.errors import ModelError
from card.models.probe import embedding_probe, probe_difference
from card.models.torch_runner import TorchRunner

_FORMAT = "card-ctc-1"
_STORED_DTYPE = torch.float16
_EPS = 1e-6


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


class Layer(nn.Module):
    """One decoder layer of the slots: they see the window and each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // 64)
        self.norm, self.mlp_norm = nn.RMSNorm(width, eps=_EPS), nn.RMSNorm(width, eps=_EPS)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, slots: Tensor, window: Tensor, seen: Tensor) -> Tensor:
        """Return the slots, [B, T, d]; ``window`` is [B, W, d], ``seen`` [B, W + T] bool."""
        x = self.norm(slots)
        memory = torch.cat((self.norm(window), x), 1)

        def heads(of: Tensor) -> Tensor:
            return of.view(*of.shape[:2], self.num_heads, -1).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory)), attn_mask=seen[:, None, None, :]
        )
        slots = slots + self.out(mixed.transpose(1, 2).flatten(2))
        x = self.mlp_norm(slots)
        added: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return slots + added


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
        self.layer = Layer(width)
        self.norm = nn.RMSNorm(width, eps=_EPS)
        self.out, self.blank = nn.Linear(width, facts.hidden_size, bias=False), nn.Linear(width, 1)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("probe", probe, persistent=False)
        self.register_buffer("_table", torch.zeros(0, facts.hidden_size), persistent=False)

    def attach(self, target: TorchRunner, name: str = "the head") -> None:
        """Take the target's embeddings. Raises: ModelError if the head was trained for another target."""
        if difference := self._difference(target):
            raise ModelError(
                f"{name} was trained for another target: {difference}; train one for this target with card train ctc"
            )
        self._table = target.embeddings(self.token_ids.tolist()).to(device="cpu", dtype=torch.float32).clone()

    def _difference(self, target: TorchRunner) -> str:
        if self.facts.vocab_size != target.vocab_size:
            return f"its vocabulary has {self.facts.vocab_size} tokens, this one {target.vocab_size}"
        if difference := probe_difference(self.probe, embedding_probe(target)):
            return difference
        known, given = self.facts.num_parameters, target.original.num_parameters
        return "" if known == given else f"its target has {known:,} parameters, this one {given:,}"

    def forward(self, inputs: Tensor, is_there: Tensor) -> Tensor:
        """Return the logits of the slots, [B, T, N + 1] float32.

        Args:
            inputs: [B, W, 2 * D] of `inputs_of`, the newest row last.
            is_there: [B, W] bool; False where a text has not so many rows.
        """
        read = self.read(inputs)
        slots = self.slots + read[:, -1:]
        seen = functional.pad(is_there, (0, self.facts.num_slots), value=True)
        x = self.norm(self.layer(slots, read + self.places, seen))
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

    def round_weights(self) -> None:
        """Round the weights to what a file holds, so that a saved head is the same one."""
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(weight.to(_STORED_DTYPE))

    # ---- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the head as safetensors, weights in float16; ``figures`` tell people of its training.

        Raises: ModelError if the file cannot be written.
        """
        tensors = {name: weight.to(_STORED_DTYPE).contiguous() for name, weight in self.state_dict().items()}
        tensors |= {"token_ids": self.token_ids.to(torch.int32), "probe": self.probe}
        facts = {name: str(value) for name, value in asdict(self.facts).items()}
        part = Path(f"{path}.part")
        try:
            save_file(tensors, str(part), {**(figures or {}), "format": _FORMAT, **facts})
            part.replace(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the head cannot be written to {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> SlotHead:
        """Read a head that `save` wrote. Raises: ModelError for a file that is missing, cut off, or no head."""
        if not Path(path).is_file():
            raise ModelError(f"there is no file {path}; train a head with card train ctc")
        try:
            with safe_open(str(path), "pt") as file:
                metadata: Mapping[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is cut off or damaged: {error}; train it again with card train ctc") from error
        if metadata.get("format") != _FORMAT:
            raise ModelError(f"{path} is no head ({_FORMAT}); give a file that card train ctc wrote")
        try:
            facts: dict[str, Any] = {one.name: int(metadata[one.name]) for one in fields(HeadFacts)[1:]}
            loss: Any = metadata["loss"]
            if loss not in LOSSES:
                raise ValueError(f"loss {loss!r}")
            head = cls(HeadFacts(loss=loss, **facts), tensors.pop("token_ids").long(), tensors.pop("probe").float())
            head.load_state_dict({name: weight.float() for name, weight in tensors.items()})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            what = " ".join(str(error).split())
            raise ModelError(f"{path} is damaged: {what}; train it again with card train ctc") from error
        return head.requires_grad_(False)


def inputs_of(features: Tensor, embeddings: Tensor) -> Tensor:
    """Return what the head reads of rows: hidden states and the embeddings of the tokens that they gave, [n, 2 * D].

    Args:
        features, embeddings: [n, D] each, floating.
    Returns: float32 on the CPU; both halves have a mean square of 1.
    """
    both = [part.to(device="cpu", dtype=torch.float32) for part in (features, embeddings)]
    return torch.cat([functional.rms_norm(part, part.shape[-1:], eps=_EPS) for part in both], -1)
