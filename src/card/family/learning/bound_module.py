"""Modules that were trained for one target's hidden states: their files are refused for any other target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.backends.transformers.arrays import as_array, as_tensor
from card.family.learning.array_head import ArrayHead
from card.kernels.number_types import Array
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes, target_difference
from card.models.own.head_sizes import EPS
from card.models.runner import RowRunner

STORED_DTYPE = torch.float16


class SavedHead(nn.Module):
    """A head that a training makes."""

    def save(self, path: Path, figures: Mapping[str, str]) -> None:
        """Write the head, its weights in float16. Raises: ModelError if it cannot be written.

        Args:
            figures: of its training, by name, for readers of the file.
        """
        raise NotImplementedError

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.parameters())


class BoundModule(SavedHead):
    """A small module trained for one target. Its file has weights, facts and a few other tensors."""

    FILE: ClassVar[TrainedFile]
    FACTS: ClassVar[type[TargetSizes]]
    BESIDES: ClassVar[tuple[str, ...]] = ("probe",)  # buffers that are also arguments
    facts: Any  # of type FACTS
    probe: Tensor

    def __init__(self, facts: TargetSizes, probe: Tensor) -> None:
        """Make a module without weights.

        Args:
            probe: of the target, see `embedding_probe`.
        """
        super().__init__()
        self.facts = facts
        self.register_buffer("probe", probe.float(), persistent=False)

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the module, its weights in float16. Raises: ModelError if the file cannot be written.

        Args:
            figures: of its training, by name, for readers of the file.
        """
        weights = {name: weight.to(STORED_DTYPE) for name, weight in self.state_dict().items()}
        said = {name: str(value) for name, value in asdict(self.facts).items()}
        besides = {name: getattr(self, name) for name in self.BESIDES}
        stored = {name: one if one.is_floating_point() else one.to(torch.int32) for name, one in besides.items()}
        arrays = {name: as_array(one, keeps_bits=True) for name, one in {**weights, **stored}.items()}
        self.FILE.save(path, arrays, {**(figures or {}), **said})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a module that `save` wrote. Raises: ModelError for a missing, damaged or other file."""
        return cls.FILE.load(path, cls._made)

    @classmethod
    def _made(cls, said: Mapping[str, str], arrays: dict[str, Array]) -> Self:
        tensors = {name: as_tensor(array) for name, array in arrays.items()}
        made = cls(cls.facts_of(said), **{name: tensors.pop(name) for name in cls.BESIDES})
        made.load_state_dict({name: weight.float() for name, weight in tensors.items()})
        return made.requires_grad_(False)

    @classmethod
    def facts_of(cls, said: Mapping[str, str]) -> Any:
        """Parse the facts of a file. Raises: KeyError, ValueError if they are faulty."""
        return cls.FACTS(**{one.name: int(said[one.name]) for one in fields(cls.FACTS)})


class DraftingHead(BoundModule):
    """A head that proposes some of the target's tokens, by the target's own embeddings."""

    BESIDES = ("token_ids", "probe")
    DRAFTS_AS: ClassVar[type[ArrayHead]]
    token_ids: Tensor
    _table: Tensor

    def __init__(self, facts: TargetSizes, token_ids: Tensor, probe: Tensor) -> None:
        """Make a head without weights.

        Args:
            token_ids: [N] integers, the target's tokens that it proposes.
        """
        super().__init__(facts, probe)
        self.register_buffer("token_ids", token_ids.long(), persistent=False)
        self.register_buffer("_table", torch.zeros(0, facts.hidden_size), persistent=False)

    def attach(self, target: RowRunner, name: str = "the head") -> None:
        """Use the target's embeddings. Raises: ModelError if the head was trained for another target."""
        self.FILE.check_made_for("target", name, target_difference(self.facts, target, as_array(self.probe)))
        self._table = as_tensor(target.embeddings(self.token_ids.tolist())).clone()

    def running(self) -> Any:
        """Return the head as it drafts, of the kind `DRAFTS_AS`."""
        said = {name: str(value) for name, value in asdict(self.facts).items()}
        stored = {**self.state_dict(), "token_ids": self.token_ids, "probe": self.probe}
        return self.DRAFTS_AS.of(said, {name: as_array(one) for name, one in stored.items()}, as_array(self._table))


def round_weights(head: nn.Module) -> None:
    """Round the weights to the precision of a file, so that a saved head is identical."""
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(weight.to(STORED_DTYPE))


def scaled(rows: Tensor) -> Tensor:
    """Return rows [..., D] with a mean square of 1, float32 on the CPU."""
    rows = rows.to(device="cpu", dtype=torch.float32)
    return functional.rms_norm(rows, rows.shape[-1:], eps=EPS)
