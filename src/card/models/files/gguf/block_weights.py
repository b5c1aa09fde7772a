"""Weights of a quantised file as the machine code reads them: its own blocks in panels, nothing unpacked or rounded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from card.kernels.blocks import pack_blocks
from card.kernels.formats import BLOCK_FORMATS
from card.kernels.formats.block_format import Bytes
from card.kernels.number_types import FLOAT32, Array, Dtype, empty
from card.kernels.packed_linear import PANEL
from card.machine.container import num_usable_cores
from card.models.files.gguf.header import GgufError
from card.models.files.gguf.model import GgufModel
from card.models.files.gguf.weights import PLAIN_DTYPES, Weight, row_bytes_of
from card.models.files.mapped_weights import MappedWeights
from card.models.files.tensor_files import tensors_written
from card.models.own.layer_inputs import LAYER_TABLE
from card.models.own.layers import BlockWeight

_Facts = dict[str, tuple[int, tuple[int, ...]]]  # type and shape of a weight, by its name
_TYPES_NAME, _TENSORS_NAME = "blocks.json", "model.safetensors"
_CHUNK_BYTES = 1 << 19  # of blocks that are packed at once
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the model, as it is kept."""

    name: str
    weight: Weight  # of the file
    form: Literal["panels", "rows", "plain"]
    shape: tuple[int, ...]
    dtype: Dtype


_Put = Callable[[_Part, int, Bytes], None]  # takes a part, the place of some of its bytes, and these


def read_blocks(model: GgufModel) -> dict[str, Array | BlockWeight]:
    """Return the weights by transformers' names, read into memory. Raises: GgufError, OSError."""
    parts = _parts(model)
    arrays = {part.name: empty(tuple(part.shape), part.dtype) for part in parts}
    room = {name: array.reshape(-1).view(np.uint8) for name, array in arrays.items()}

    def put(part: _Part, first: int, data: Bytes) -> None:
        room[part.name][first : first + len(data)] = data

    _read(model, parts, put)
    return _weights(arrays, _block_facts(parts))


def write_blocks(folder: Path, model: GgufModel) -> None:
    """Write the weights to a safetensors file, and beside it which of them are blocks. Raises: GgufError, OSError."""
    parts = _parts(model)
    kinds = {part.name: (part.dtype, part.shape) for part in parts}
    with tensors_written(folder / _TENSORS_NAME, kinds) as (stream, places):

        def put(part: _Part, first: int, data: Bytes) -> None:
            first += places[part.name]
            while len(data):  # a disk that becomes full takes a part of it
                written = os.pwrite(stream.fileno(), data.data, first)
                first, data = first + written, data[written:]

        _read(model, parts, put)
    (folder / _TYPES_NAME).write_text(json.dumps(_block_facts(parts)), "utf-8")


def blocks_bytes(model: GgufModel) -> int:
    """Return the bytes that `write_blocks` writes, but for the header."""
    return sum(_num_bytes(part) for part in _parts(model))


def map_blocks(folder: Path) -> tuple[dict[str, Array | BlockWeight], MappedWeights]:
    """Return the weights that were written to a folder, and the memory that they are mapped to.

    Raises: OSError, ValueError, LookupError, TypeError if they are not as they were written.
    """
    pages = MappedWeights(folder / _TENSORS_NAME)
    facts = json.loads((folder / _TYPES_NAME).read_text("utf-8"))
    return _weights(pages.arrays, facts), pages


def _parts(model: GgufModel) -> Sequence[_Part]:
    """Return what is kept of a file, panels first: their sizes keep what follows aligned."""
    parts = []
    for weight in model.weights:
        shape, type_id = weight.place.shape, weight.place.type_id
        form, stays_float = BLOCK_FORMATS.get(type_id), len(shape) == 1 or weight.stays_float
        if form is None or stays_float:
            dtype = FLOAT32 if stays_float else PLAIN_DTYPES[type_id]
            parts.append(_Part(weight.name, weight, "plain", shape, dtype))
            continue
        num_out, num_in = shape
        panels = -(-num_out // PANEL), form.panel_bytes(num_in)
        if weight.name in (_EMBEDDINGS, LAYER_TABLE):
            rows = num_out, num_in // form.inputs * form.num_bytes
            parts.append(_Part(weight.name, weight, "rows", rows, np.dtype(np.uint8)))
            if weight.name == LAYER_TABLE or not model.config["tie_word_embeddings"]:
                continue
        name = _HEAD if weight.name == _EMBEDDINGS else weight.name
        parts.append(_Part(name, weight, "panels", panels, np.dtype(np.uint8)))
    return sorted(parts, key=lambda part: part.form)


def _num_bytes(part: _Part) -> int:
    return int(np.prod(part.shape)) * part.dtype.itemsize


def _read(model: GgufModel, parts: Sequence[_Part], put: _Put) -> None:
    """Read all parts from the file, some rows at a time on each core: what lies between stays in its cache."""
    chunks = [(part, *rows) for part in parts for rows in _chunks(part)]
    with ThreadPoolExecutor(num_usable_cores()) as threads:
        for _ in threads.map(lambda chunk: _read_chunk(model, put, *chunk), chunks):
            pass  # the first error ends it


def _chunks(part: _Part) -> Iterator[tuple[int, int]]:
    """Yield which rows of a part are read at once: the first one, and how many."""
    place = part.weight.place
    size = PANEL * max(1, _CHUNK_BYTES // (PANEL * row_bytes_of(place)))
    if part.form == "plain" or part.weight.order is not None:  # small, or each row may be anywhere
        size = place.num_rows
    for first in range(0, place.num_rows, size):
        yield first, min(size, place.num_rows - first)


def _read_chunk(model: GgufModel, put: _Put, part: _Part, first: int, count: int) -> None:
    """Read some rows of a part, which begin with a panel."""
    if part.form == "plain":
        place = 0
        for rows in model.read_tiled(part.weight, part.dtype):
            data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
            put(part, place, data)
            place += len(data)
        return
    raw, form = model.read_raw(part.weight, first, count), BLOCK_FORMATS[part.weight.place.type_id]
    try:
        if part.form == "rows":
            form.check(raw)
            put(part, first * raw.shape[1], raw.reshape(-1))
            return
        panels = pack_blocks(raw, form)
    except ValueError as error:
        raise GgufError(f"cannot run as it is: {part.weight.place.name}: {error}") from None
    put(part, first // PANEL * panels.shape[1], panels.reshape(-1))


def _block_facts(parts: Sequence[_Part]) -> _Facts:
    """Return type and shape of all weights that are blocks."""
    return {part.name: (part.weight.place.type_id, part.weight.place.shape) for part in parts if part.form != "plain"}


def _weights(arrays: dict[str, Array], facts: dict[str, tuple[int, tuple[int, ...]]]) -> dict[str, Array | BlockWeight]:
    weights: dict[str, Array | BlockWeight] = dict(arrays)
    for name, (type_id, shape) in facts.items():
        weights[name] = BlockWeight(type_id, arrays[name], tuple(shape))
    return weights
