"""Files of heads that draft from one target's hidden states: written whole, and refused for any other target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.errors import ModelError
from card.models.probe import embedding_probe, probe_difference
from card.models.torch_runner import TorchRunner
from card.models.trained_file import TrainedFile

STORED_DTYPE = torch.float16
EPS = 1e-6
_Head = TypeVar("_Head", bound=nn.Module)


class TargetSizes(Protocol):
    """Sizes of the target that a head was trained for."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...


class HeadKind(TrainedFile):
    """A kind of head."""

    def save_head(
        self, path: str | Path, head: nn.Module, facts: Mapping[str, Any], others: Mapping[str, Tensor], figures: Any
    ) -> None:
        """Write a head, its weights in float16.

        Args:
            others: tensors besides its weights.
            figures: texts that tell people of its training, by name; None for none.
        Raises: ModelError if the file cannot be written.
        """
        weights = {name: weight.to(STORED_DTYPE) for name, weight in head.state_dict().items()}
        said = {name: str(value) for name, value in facts.items()}
        self.save(path, {**weights, **others}, {**(figures or {}), **said})

    def load_head(self, path: str | Path, make: Callable[[Mapping[str, str], dict[str, Tensor]], _Head]) -> _Head:
        """Read a head that `save_head` wrote.

        Args:
            make: takes the facts and the tensors, pops those that are no weights, and returns a head without weights.
        Raises: ModelError for a file that is missing, cut off, or no such head.
        """

        def filled(facts: Mapping[str, str], tensors: dict[str, Tensor]) -> _Head:
            head = make(facts, tensors)
            head.load_state_dict({name: weight.float() for name, weight in tensors.items()})
            return head

        return self.load(path, filled)

    def require_target(self, name: str, sizes: TargetSizes, probe: Tensor, target: TorchRunner) -> None:
        """Raise ModelError if the head of a name was trained for another target; ``probe`` as of `embedding_probe`."""
        if difference := _difference(sizes, probe, target):
            raise ModelError(
                f"{name} was trained for another target: {difference}; train one for this target with {self.command}"
            )


def _difference(sizes: TargetSizes, probe: Tensor, target: TorchRunner) -> str:
    if sizes.vocab_size != target.vocab_size:
        return f"its vocabulary has {sizes.vocab_size} tokens, this one {target.vocab_size}"
    if difference := probe_difference(probe, embedding_probe(target)):
        return difference
    known, given = sizes.num_parameters, target.original.num_parameters
    return "" if known == given else f"its target has {known:,} parameters, this one {given:,}"


def round_weights(head: nn.Module) -> None:
    """Round the weights to what a file holds, so that a saved head is the same one."""
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(weight.to(STORED_DTYPE))


def scaled(rows: Tensor) -> Tensor:
    """Return rows [..., D] with a mean square of 1, float32 on the CPU."""
    rows = rows.to(device="cpu", dtype=torch.float32)
    return functional.rms_norm(rows, rows.shape[-1:], eps=EPS)


def inputs_of(features: Tensor, embeddings: Tensor) -> Tensor:
    """Return what a head reads of rows: hidden states and the embeddings of the tokens that they gave, [n, 2 * D].

    Args:
        features, embeddings: [n, D] each, floating.
    Returns: float32 on the CPU; both halves have a mean square of 1.
    """
    return torch.cat([scaled(features), scaled(embeddings)], -1)
