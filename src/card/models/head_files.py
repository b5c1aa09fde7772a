"""Files of heads that draft from one target's hidden states: written whole, and refused for any other target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from card.errors import ModelError
from card.models.probe import embedding_probe, probe_difference
from card.models.torch_runner import TorchRunner

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


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of head: what its files say of themselves, and the command that makes them."""

    format: str
    command: str

    def save(
        self, path: str | Path, head: nn.Module, facts: Mapping[str, Any], others: Mapping[str, Tensor], figures: Any
    ) -> None:
        """Write a head as safetensors, its weights in float16.

        Args:
            others: tensors besides its weights.
            figures: texts that tell people of its training, by name; None for none.
        Raises: ModelError if the file cannot be written.
        """
        tensors = {name: weight.to(STORED_DTYPE).contiguous() for name, weight in head.state_dict().items()}
        said = {name: str(value) for name, value in facts.items()}
        part = Path(f"{path}.part")
        try:
            save_file({**tensors, **others}, str(part), {**(figures or {}), "format": self.format, **said})
            part.replace(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the head cannot be written to {path}: {error}") from error

    def load(self, path: str | Path, make: Callable[[Mapping[str, str], dict[str, Tensor]], _Head]) -> _Head:
        """Read a head that `save` wrote.

        Args:
            make: takes the facts and the tensors, pops those that are no weights, and returns a head without weights.
        Raises: ModelError for a file that is missing, cut off, or no such head.
        """
        if not Path(path).is_file():
            raise ModelError(f"there is no file {path}; train a head with {self.command}")
        try:
            with safe_open(str(path), "pt") as file:
                facts: Mapping[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is cut off or damaged: {error}; train it again with {self.command}") from error
        if facts.get("format") != self.format:
            raise ModelError(f"{path} is no head ({self.format}); give a file that {self.command} wrote")
        try:
            head = make(facts, tensors)
            head.load_state_dict({name: weight.float() for name, weight in tensors.items()})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            what = " ".join(str(error).split())
            raise ModelError(f"{path} is damaged: {what}; train it again with {self.command}") from error
        return head

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
