"""Compare the sizes of a model as transformers builds it with its weights, before memory is allocated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from card.models.files.weight_files import FolderError, Shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SPARE = 2  # a head that shares the embeddings' weights is stored once but counted twice
_PACKED = 16  # numbers in one stored number of quantised weights
_ABSENT = 1.05  # ratio of needed to stored numbers, without tied weights, above which tensors are missing
_MOST_MADE = 1 << 28  # numbers of computed masks and tables; more only if the weights are more


def check_sizes(empty: PreTrainedModel, shapes: Shapes) -> None:
    """Check that a model is about as large as its stored weights.

    transformers itself finds a single missing tensor, or one of another shape and the same size.

    Args:
        empty: built from the config on the device "meta".
    Raises: FolderError, with the first tensor of another size or without numbers, or with both sizes.
    """
    is_packed = getattr(empty.config, "quantization_config", None) is not None
    held = {_inner_name(empty, name): math.prod(shape) for name, shape in shapes.items()}
    asked = {_inner_name(empty, name): tensor.numel() for name, tensor in empty.named_parameters()}
    for name, size in asked.items():
        if not is_packed and held.get(name, size) != size:
            raise FolderError(f"it asks for {size} numbers in {name}, and they have {held[name]}; download it again")
    total, stored = sum(asked.values()), sum(held.values())
    made = sum(tensor.numel() for tensor in empty.buffers())
    if total > stored * (_PACKED if is_packed else _SPARE) or made > max(stored, _MOST_MADE):
        raise FolderError(f"it asks for {total + made} numbers, and they are {stored}; download it again")
    tied = {_inner_name(empty, name) for name in getattr(empty, "all_tied_weights_keys", None) or ()}
    needed = sum(size for name, size in asked.items() if name not in tied)
    if not is_packed and needed > stored * _ABSENT:
        first = next((name for name in asked if name not in held and name not in tied), "a part of one")
        raise FolderError(
            f"it asks for {needed} numbers, and they are {stored}: tensors are missing or have unknown names,"
            f" the first is {first}; download it again"
        )


def _inner_name(model: PreTrainedModel, name: str) -> str:
    """Return a tensor's name without that of the part with all layers, which some files omit."""
    return name.removeprefix(f"{model.base_model_prefix}.")
