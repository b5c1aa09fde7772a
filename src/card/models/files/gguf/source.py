"""GGUF files as sources of models: what a first start makes of one is kept for the next."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from card.kernels.formats import BLOCK_FORMATS
from card.kernels.number_types import FLOAT32, STORED_DTYPES, Array, Dtype, empty
from card.kernels.packed_linear import GROUP, LANES
from card.machine.memory import is_shortage
from card.models.architectures import Architecture, find_architecture
from card.models.architectures.architecture import TILED
from card.models.files.generation_config import GenerationConfig
from card.models.files.gguf.block_weights import blocks_bytes, map_blocks, read_blocks, write_blocks
from card.models.files.gguf.config import generation_config
from card.models.files.gguf.header import GgufError
from card.models.files.gguf.kept_block import head_place, header_of_block, kept_block
from card.models.files.gguf.model import GgufHeader, GgufModel, block_of, model_of, read_gguf, read_kept_ids
from card.models.files.gguf.named_weights import weights_of, write_weights
from card.models.files.gguf.other_types import type_name
from card.models.files.gguf.parts import part_files
from card.models.files.gguf.tokenizer import (
    check_tokenizer,
    load_tokenizer,
    read_tokenizer,
    tokenizer_digest,
    write_tokenizer,
)
from card.models.files.gguf.weights import PLAIN_DTYPES, Weight
from card.models.files.kept_weights import KEPT_FOLDER, KeptWeights, state_of
from card.models.files.mapped_weights import MappedWeights
from card.models.own.decoder_model import DecoderModel
from card.models.own.expert_weights import split_experts
from card.models.own.layers import BlockWeight
from card.models.own.plain_config import config_of
from card.models.rows.row_tree import IntArray
from card.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_FORMAT = 6  # of what is kept; another number makes old entries useless, and they go when room is needed
_BLOCKS_FORMAT = 1  # of packed blocks
_TEXT_FORMAT = 5  # of tokenizers
_FACTS_FORMAT = 3  # of what is told of a file
_FACTS_NAME = "facts.json"
_TEXT_BYTES = 64 << 20  # room asked for a tokenizer


class GgufSource:
    """One file, or one model in several. Methods raise GgufError if it cannot be used, OSError if it cannot be read."""

    def __init__(self, path: Path, cache: Path | None) -> None:
        """Take a file, the first one of a model in several parts.

        Args:
            cache: the folder for what is kept between starts; None keeps nothing.
        """
        self._path = path
        self._state = state_of(part_files(path))
        self._store = None if cache is None else KeptWeights(cache / KEPT_FOLDER, source=path)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The fields that config.json would have; its dtype is that of the weights, bfloat16 for quantised ones."""
        return dict(self._facts["config"])

    @property
    def is_quantized(self) -> bool:
        """True if some weights have fewer than 16 bits."""
        return bool(self.config["is_quantized"])

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with the chat template."""
        made: list[Tokenizer] = []

        def write(folder: Path) -> None:
            made.append(self._write_text(folder))

        path = None if self._store is None else self._store.make(self._name(f"text{_TEXT_FORMAT}"), _TEXT_BYTES, write)
        if made:  # also if it could not be kept in the end
            return made[0]
        if path is not None:
            return load_tokenizer(path)
        header = self._model.header
        with _tokenizer_explained():
            return read_tokenizer(header)

    def shares_tokenizer(self, other: GgufSource) -> bool:
        """Return whether both files are known to have one tokenizer, but for the chat template."""
        return bool(self._facts["tokenizer"] == other._facts["tokenizer"])

    def folder(self, dtype: str) -> Path | None:
        """Return a folder with the whole model, converted if it is not there; None if nothing can be kept."""
        if self._store is None:
            return None
        stored = self.stored_dtype(dtype)
        name = self._name(stored.name)
        folder = self._store.find(name)
        if folder is not None:
            return folder  # without a look at the file
        logger.info("converting %s to %s; this happens once", self._path, stored.name)
        num_bytes = self._model.num_elements * stored.itemsize + _TEXT_BYTES
        return self._store.make(name, num_bytes, functools.partial(self._write_model, dtype=stored))

    def decoder(self, dtype: str) -> DecoderModel:
        """Return the model with weights of 16 or 32 bits; "auto" is the file's own dtype."""
        folder, wanted = self.folder(dtype), self.stored_dtype(dtype)
        pages = None if folder is None else self._mapped(folder)
        arrays = self.weights(dtype) if pages is None else pages.arrays
        return self._decoder(split_experts(arrays, self._architecture), pages, wanted)

    @property
    def why_not_blocks(self) -> str | None:
        """The reason that the file's blocks cannot run as they are where passes of integers do; None: they can."""
        types = set(self.config["matrix_types"])  # kept, as formats may have been added since
        if unknown := sorted(types - BLOCK_FORMATS.keys() - PLAIN_DTYPES.keys()):
            names = ", ".join(map(type_name, unknown))
            return f"some of its tensors are {names}, which have no products of integers here"
        if types.isdisjoint(BLOCK_FORMATS):
            return "it has none"
        heads = [one["head_dim"] for one in (self.config, *self.config.get("per_layer_config", {}).values())]
        if odd := [size for size in heads if size % LANES]:
            return f"heads of {odd[0]} channels are no multiple of {LANES}"
        if (width := self.config.get("hidden_size_per_layer_input", 0)) % GROUP:
            return f"{width} numbers of a token for each layer are no multiple of {GROUP}"
        return None

    @property
    def products(self) -> list[str]:
        """The formats of the blocks that passes multiply by as they are."""
        types = [one for one in self.config["matrix_types"] if one in BLOCK_FORMATS]
        return [] if self.why_not_blocks is not None else [BLOCK_FORMATS[one].product for one in types]

    def block_decoder(self) -> DecoderModel:
        """Return the model with the file's own blocks, packed for integer passes; `why_not_blocks` must be None."""
        weights, pages = self._packed(f"blocks{_BLOCKS_FORMAT}", lambda: self._model)
        return self._decoder(weights, pages, FLOAT32, as_stored=True)

    def _packed(
        self, kind: str, model: Callable[[], GgufModel]
    ) -> tuple[dict[str, Array | BlockWeight], MappedWeights | None]:
        """Return weights with the file's own blocks, and the memory that they are mapped to: kept ones if there are."""

        def write(folder: Path) -> None:
            write_blocks(folder, model())
            self._check_unchanged()

        name, store = self._name(kind), self._store
        stored = None if store is None else store.find(name)
        if stored is None and store is not None:
            logger.info("packing the blocks of %s; this happens once", self._path)
            stored = store.make(name, blocks_bytes(model()), write)
        if stored is None:
            weights = read_blocks(model())
            self._check_unchanged()
            return weights, None
        with self._explained(stored):
            return map_blocks(stored)

    def _decoder(
        self,
        weights: Mapping[str, Array | BlockWeight],
        pages: MappedWeights | None,
        dtype: Dtype,
        *,
        as_stored: bool = False,
    ) -> DecoderModel:
        """Return the model with these weights; ``as_stored`` if their heads have the file's order."""
        architecture = find_architecture(self.config["model_type"])
        assert architecture is not None
        marks = {TILED: True} if as_stored and architecture.gguf.is_tiled else {}
        config = config_of({**self.config, **marks})
        assert config is not None
        config.dtype = dtype.name
        generation = GenerationConfig.of(generation_config(self.config))
        model = DecoderModel(
            architecture.as_stored(weights) if as_stored else architecture, config, generation, weights
        )
        model.pages = () if pages is None else (pages,)
        return model

    @property
    def _architecture(self) -> Architecture:
        architecture = find_architecture(self.config["model_type"])
        assert architecture is not None
        return architecture

    def _mapped(self, folder: Path) -> MappedWeights:
        with self._explained(folder):
            return MappedWeights(folder / "model.safetensors")

    @contextlib.contextmanager
    def _explained(self, folder: Path) -> Iterator[None]:
        """Turn any error of reading a kept folder into one line."""
        try:
            yield
        except (OSError, ValueError, LookupError, TypeError) as error:
            if is_shortage(error):
                raise
            raise GgufError(f"has damaged converted weights; delete the folder {folder}") from error

    def weights(self, dtype: str) -> dict[str, Array]:
        """Return all weights by the names of transformers' modules, read into memory."""
        stored, weights = self.stored_dtype(dtype), {}
        for name, kind, shape, pieces in weights_of(self._model, stored):
            array, first = empty(shape, kind), 0
            room = array.reshape(-1)
            for piece in pieces:
                room[first : first + piece.size] = piece.reshape(-1)
                first += piece.size
            weights[name] = array
        self._check_unchanged()
        return weights

    @functools.cached_property
    def block(self) -> GgufModel | None:
        """The block that drafts, with its weights under the names of folders; None if there is none."""
        return None if self._block_header is None else block_of(self._block_header)

    @property
    def has_block(self) -> bool:
        """Return whether the file holds a block that drafts."""
        return self._facts["block"] is not None

    @property
    def is_block_alone(self) -> bool:
        """Return whether the file holds a block that drafts for a model in another file, and no model."""
        return bool(self._facts["is_block_alone"])

    @property
    def block_layer(self) -> int:
        """The number of the block that drafts, behind the layers of its model: how many these are."""
        assert self._block_header is not None
        return int(self._block_header.drafting[0].name.split(".")[1])

    @property
    def block_ids(self) -> IntArray | None:
        """The tokens that a block alone in its file proposes; None for all."""
        return None if self._block_header is None else read_kept_ids(self._block_header)

    @property
    def block_runs_as_stored(self) -> bool:
        """Return whether all matrices of the block that drafts are numbers, or blocks that passes multiply by."""
        assert self.block is not None
        types = {one.place.type_id for one in self.block.weights}
        return types <= BLOCK_FORMATS.keys() | PLAIN_DTYPES.keys()

    def stored_block_weights(self) -> tuple[dict[str, Array | BlockWeight], MappedWeights | None]:
        """Return the weights of the block that drafts, as `block_decoder` has those of the model; no head.

        Also returns the memory that they are mapped to.
        """
        block = self.block
        assert block is not None
        return self._packed(f"draft{_BLOCKS_FORMAT}", lambda: block)

    @functools.cached_property
    def _block_header(self) -> GgufHeader | None:
        header = self._facts["block"]
        return None if header is None else header_of_block(header, self.config)

    def block_weights(self, dtype: str, only: Container[str] | None = None) -> dict[str, Array]:
        """Return the weights of the block that drafts, and the head if it stands apart, read into memory.

        `block` must not be None. The head's blocks are left out: passes multiply by them as they are.

        Args:
            only: the names of those that are read; None: all.
        """
        assert self.block is not None
        assert self._block_header is not None
        stored, head = self.stored_dtype(dtype), None if self.is_block_alone else head_place(self._block_header)
        heads = [] if head is None or head.type_id not in PLAIN_DTYPES else [Weight("lm_head.weight", head, None)]
        places = [*self.block.weights, *heads]
        tensors = {
            name: np.concatenate([piece.reshape(-1) for piece in pieces]).reshape(shape)
            for name, _, shape, pieces in weights_of(replace(self.block, weights=places), stored)
            if only is None or name in only
        }
        self._check_unchanged()
        return tensors

    def block_config(self, dtype: str) -> Any:
        """Return the config of the whole model for its block."""
        config = config_of(self.config)
        assert config is not None
        config.dtype = self.stored_dtype(dtype).name
        return config

    def stored_dtype(self, dtype: str) -> Dtype:
        """Return what the weights are kept in for a dtype that is asked for; "auto" is the file's own."""
        return STORED_DTYPES.get(self.config["dtype"] if dtype == "auto" else dtype, FLOAT32)

    def _name(self, kind: str) -> str:
        """Return the name under which something made of this file is kept."""
        return f"{hashlib.sha256(self._state.encode()).hexdigest()[:32]}-v{_FORMAT}-{kind}"

    @functools.cached_property
    def _model(self) -> GgufModel:
        model = model_of(self._header)
        check_tokenizer(model.header)
        return model

    @functools.cached_property
    def _header(self) -> GgufHeader:
        return read_gguf(self._path)

    @functools.cached_property
    def _facts(self) -> dict[str, Any]:
        """The config, and a digest of the tokenizer: what is asked for without the weights."""
        name = self._name(f"facts{_FACTS_FORMAT}")
        stored = None if self._store is None else self._store.make(name, 0, self._write_facts)
        if stored is None:
            return self._read_facts()
        facts: dict[str, Any] = json.loads((stored / _FACTS_NAME).read_text("utf-8"))
        return facts

    def _read_facts(self) -> dict[str, Any]:
        read = self._header
        model = read if read.is_block_alone else self._model
        return {
            "config": dict(model.config),
            "tokenizer": tokenizer_digest(model.header),
            "block": kept_block(read),
            "is_block_alone": read.is_block_alone,
        }

    def _write_facts(self, folder: Path) -> None:
        _write_json(folder / _FACTS_NAME, self._read_facts())
        self._check_unchanged()

    def _write_text(self, folder: Path) -> Tokenizer:
        header = self._model.header
        _ = self._facts  # which are asked for next: kept now, while the header is at hand
        with _tokenizer_explained():
            tokenizer = write_tokenizer(header, folder)
        self._check_unchanged()
        return tokenizer

    def _write_model(self, folder: Path, *, dtype: Dtype) -> None:
        write_weights(folder / "model.safetensors", self._model, dtype)
        _write_json(folder / "config.json", {**self._model.config, "dtype": dtype.name})
        _write_json(folder / "generation_config.json", generation_config(self._model.config))
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if state_of(part_files(self._path)) != self._state:
            raise GgufError("changed while it was read; start again once it is complete")


@contextlib.contextmanager
def _tokenizer_explained() -> Iterator[None]:
    """Turn any error of building a tokenizer into one line; the libraries raise even Exception itself."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise GgufError(f"has a tokenizer that cannot be used: {' '.join(str(error).split())[:150]}") from error


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2), "utf-8")
