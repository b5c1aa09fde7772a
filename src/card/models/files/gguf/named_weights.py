"""Weights of a GGUF file by the names of transformers' modules."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from card.kernels.number_types import FLOAT32, Array, Dtype
from card.models.architectures import find_architecture
from card.models.files.gguf.model import GgufModel
from card.models.files.gguf.weights import Weight
from card.models.files.tensor_files import bytes_of, tensors_written
from card.models.own.expert_weights import grouped, joined_pieces, joined_shape


def write_weights(file: Path, model: GgufModel, dtype: Dtype) -> None:
    """Write the weights as safetensors has them: sizes first, then one tensor after the other."""
    kinds = {name: (kind, shape) for name, kind, shape, _ in weights_of(model, dtype)}
    with tensors_written(file, kinds) as (stream, _):
        for piece in (one for *_, pieces in weights_of(model, dtype) for one in pieces):
            stream.write(bytes_of(piece))


def weights_of(model: GgufModel, dtype: Dtype) -> Iterator[tuple[str, Dtype, tuple[int, ...], Iterator[Array]]]:
    """Yield the weights: each with its name, dtype and shape, and piece after piece."""
    architecture = find_architecture(model.config["model_type"])
    assert architecture is not None
    for name, parts in grouped((weight.name, weight) for weight in model.folder_weights).items():
        kind = FLOAT32 if parts[0].is_vector else dtype
        shape = joined_shape(name, [one.place.shape for one in parts], architecture)
        yield name, kind, shape, joined_pieces(name, parts, functools.partial(_pieces, model, kind), architecture)


def _pieces(model: GgufModel, dtype: Dtype, weight: Weight) -> Iterator[Array]:
    return model.read(weight, dtype)
