"""What the tests of passes in fixed shapes share: runners on the same weights, and a look at what a step does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM, PreTrainedModel

from card.backends.cuda.bucketed import BucketedRunner
from card.backends.cuda.stream_lane import StreamLane
from card.machine.lane import Lane
from card.models.runner import RowRunner
from tests.tiny import tiny_llama

VOCAB_SIZE = 61
MAX_MODEL_LEN = 400
MAX_TREE_ROWS = 128
# What reads a value back from the device, or makes a shape depend on one.
SYNCHRONISING = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
    "bincount",
)


class Ordinary(BucketedRunner):
    """A runner whose passes have any shape, walked by torch on a CPU as on a GPU."""

    has_recorded_passes = False

    def __init__(self, model: PreTrainedModel, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.static = None


@functools.cache
def make_model(*, noise: float = 0.0) -> LlamaForCausalLM:
    """Return a small random Llama with grouped heads; ``noise`` moves its weights by so many times their spread."""
    ends = {"bos_token_id": None, "eos_token_id": None}
    return tiny_llama(VOCAB_SIZE, noise=noise, max_position_embeddings=512, **ends)


def ordinary(device: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> RowRunner:
    """Return a runner whose passes have the shapes that they need, walked by torch on a CPU too."""
    model = copy.deepcopy(make_model()).to(device, dtype)  # type: ignore[call-overload]
    return Ordinary(model, **{"max_model_len": MAX_MODEL_LEN, "max_tree_rows": MAX_TREE_ROWS, **settings})


def bucketed(device: str, *, noise: float = 0.0, dtype: torch.dtype = torch.float32, **settings: Any) -> BucketedRunner:
    """Return a runner whose passes have few shapes, with the same weights but for ``noise``."""
    model = copy.deepcopy(make_model(noise=noise)).to(device, dtype)  # type: ignore[call-overload]
    return BucketedRunner(model, **{"max_model_len": MAX_MODEL_LEN, "max_tree_rows": MAX_TREE_ROWS, **settings})


def tensor_of(rows: Any) -> torch.Tensor:
    """Return logits or rows of a runner, on any device, as a tensor on the CPU."""
    return rows.detach().cpu().clone() if isinstance(rows, torch.Tensor) else torch.from_numpy(np.array(rows))


def lane_of(device: str) -> Lane:
    """Return a place of its own for a worker on a device."""
    return Lane() if device == "cpu" else StreamLane(device)


Operation = tuple[str, tuple[object, ...]]


class _Watch(TorchDispatchMode):
    """Notes each operation with what it takes and gives: shape and dtype of tensors, plain arguments as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = [*tree_leaves(args), *tree_leaves(kwargs), *tree_leaves(out)]
        noted = tuple((leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.operations.append((str(func), noted))
        return out


def operations_of(run: Callable[[], object]) -> list[Operation]:
    """Return the operations of one call of ``run`` in order."""
    with torch.inference_mode(), _Watch() as watch:
        run()
    return watch.operations


def synchronising(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations that make the host wait, or a shape depend on a value."""
    return [operation for operation in operations if _is_synchronising(*operation)]


def _is_synchronising(full_name: str, noted: tuple[object, ...]) -> bool:
    name = full_name.removeprefix("aten.").partition(".")[0]
    has_mask = any(isinstance(one, tuple) and one[0] == torch.bool for one in noted[1:-1])
    return name in SYNCHRONISING or (name.startswith("index") and has_mask)
