"""Weights of a quantised file as the machine code reads them: its own blocks in panels, nothing unpacked or rounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from card.kernels.blocks import BLOCK_FORMATS, pack_blocks
from card.kernels.int8_linear import PANEL
from card.models.block_layers import BlockWeight
from card.models.gguf.header import GgufError
from card.models.gguf.model import GgufModel
from card.models.gguf.weights import PLAIN_DTYPES, Weight
from card.models.mapped_weights import MappedWeights, safetensors_header

_Facts = dict[str, tuple[int, tuple[int, ...]]]  # type and shape of a weight, by its name
_TYPES_NAME, _TENSORS_NAME = "blocks.json", "model.safetensors"
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the model, as it is kept."""

    name: str
    weight: Weight  # of the file
    form: Literal["panels", "rows", "plain"]
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_blocks(model: GgufModel) -> dict[str, Tensor | BlockWeight]:
    """Return the weights by transformers' names, read into memory. Raises: GgufError, OSError."""
    parts = _parts(model)
    return _weights({part.name: _tensor(model, part) for part in parts}, _block_facts(parts))


def write_blocks(folder: Path, stream: BinaryIO, model: GgufModel) -> None:
    """Write the weights to a safetensors file, and beside it which of them are blocks. Raises: GgufError, OSError."""
    parts, end, header = _parts(model), 0, dict[str, object](__metadata__={"format": "pt"})
    for part in parts:
        start, end = end, end + _num_bytes(part)
        header[part.name] = {"dtype": _NAMES[part.dtype], "shape": part.shape, "data_offsets": [start, end]}
    stream.write(safetensors_header(header))
    for part in parts:
        stream.write(_tensor(model, part).contiguous().flatten().view(torch.uint8).numpy().data)
    (folder / _TYPES_NAME).write_text(json.dumps(_block_facts(parts)), "utf-8")


def blocks_bytes(model: GgufModel) -> int:
    """Return the bytes that `write_blocks` writes, but for the header."""
    return sum(_num_bytes(part) for part in _parts(model))


def map_blocks(folder: Path) -> tuple[dict[str, Tensor | BlockWeight], MappedWeights]:
    """Return the weights that were written to a folder, and the memory that they are mapped to.

    Raises: OSError, ValueError, LookupError, TypeError if they are not as they were written.
    """
    pages = MappedWeights(folder / _TENSORS_NAME)
    facts = json.loads((folder / _TYPES_NAME).read_text("utf-8"))
    return _weights(pages.tensors, facts), pages


def _parts(model: GgufModel) -> Sequence[_Part]:
    """Return what is kept of a file, panels first: their sizes keep what follows aligned."""
    parts = []
    for weight in model.weights:
        shape, type_id = weight.place.shape, weight.place.type_id
        form = BLOCK_FORMATS.get(type_id)
        if form is None or len(shape) == 1:
            dtype = torch.float32 if len(shape) == 1 else PLAIN_DTYPES[type_id]
            parts.append(_Part(weight.name, weight, "plain", shape, dtype))
            continue
        num_out, num_in = shape
        panels = -(-num_out // PANEL), form.panel_bytes(num_in)
        if weight.name == _EMBEDDINGS:
            rows = num_out, num_in // form.inputs * form.num_bytes
            parts.append(_Part(weight.name, weight, "rows", rows, torch.uint8))
            if not model.config["tie_word_embeddings"]:
                continue
        name = _HEAD if weight.name == _EMBEDDINGS else weight.name
        parts.append(_Part(name, weight, "panels", panels, torch.uint8))
    return sorted(parts, key=lambda part: part.form)


def _num_bytes(part: _Part) -> int:
    return int(np.prod(part.shape)) * part.dtype.itemsize


def _tensor(model: GgufModel, part: _Part) -> Tensor:
    """Read a part from the file."""
    if part.form == "plain":
        return torch.cat(list(model.read(part.weight, part.dtype)))
    raw = model.read_raw(part.weight)
    if part.form == "rows":
        return torch.from_numpy(raw)
    try:
        return torch.from_numpy(pack_blocks(raw, BLOCK_FORMATS[part.weight.place.type_id]))
    except ValueError as error:
        raise GgufError(f"cannot run as it is: {part.weight.place.name}: {error}") from None


def _block_facts(parts: Sequence[_Part]) -> _Facts:
    """Return type and shape of all weights that are blocks."""
    return {part.name: (part.weight.place.type_id, part.weight.place.shape) for part in parts if part.form != "plain"}


def _weights(
    tensors: dict[str, Tensor], facts: dict[str, tuple[int, tuple[int, ...]]]
) -> dict[str, Tensor | BlockWeight]:
    weights: dict[str, Tensor | BlockWeight] = dict(tensors)
    for name, (type_id, shape) in facts.items():
        weights[name] = BlockWeight(type_id, tensors[name], tuple(shape))
    return weights
