"""Load what drafts from a target's states: the block of its checkpoint, an EAGLE-3 head, or HiViS's drafter.

Errors are one clear line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from card.config import INT8
from card.errors import ModelError, named
from card.kernels.number_types import STORED_DTYPES, Array
from card.machine.folders import expanded
from card.models.by_transformers import torch_module
from card.models.dtypes import AUTO, CPU, parse_dtype, runs_as_blocks
from card.models.files.eagle_folder import FC, is_eagle_folder, read_facts
from card.models.files.gguf.eagle import in_file_words, is_eagle_gguf, read_eagle_gguf
from card.models.files.gguf.source import GgufSource
from card.models.files.mapped_weights import MappedWeights
from card.models.files.places import hub_file
from card.models.files.sources import Source, explained, find_source, quiet
from card.models.files.weight_files import tensor_shapes, weight_files
from card.models.fingerprint import target_difference
from card.models.loaded_model import LoadedModel
from card.models.names import OWN_BLOCK
from card.models.own.draft_block import BlockError, DraftBlock, has_folder_block, read_folder_block, read_gguf_block
from card.models.own.eagle_head import EagleHead, HeadTarget, eagle_head
from card.models.own.fused_head import FUSED_FILE, FUSED_WEIGHTS, FusedFacts, FusedHead, fused_head, is_fused_folder
from card.models.own.layers import Weight
from card.models.parallel_draft import wants_states
from card.models.runner import ExactRunner, RowRunner

_OTHER_HEAD = f"use the head of this target, or leave {named('draft')} out"
_INSTEAD = f"name a draft model, or leave {named('draft')} out"

StateDrafter = DraftBlock | EagleHead | FusedHead


def require_block(target: str | LoadedModel, *, cache_dir: str | None) -> None:
    """Check that a target's checkpoint holds a block that drafts, without reading its weights.

    Raises: ModelError that says what to do instead.
    """
    if not isinstance(target, str):
        raise ModelError(f"{named('draft')} {OWN_BLOCK} is read from the target's files: give the target by name")
    if not has_block(target, cache_dir=cache_dir):
        lacks = "mtp.fc.weight or eh_proj"
        if target.endswith(".gguf"):
            lacks = "blk.N.nextn.eh_proj.weight: llama.cpp's converter keeps none of MiMo-7B, whose folder has one"
        raise ModelError(
            f"{target} holds no block that drafts (no tensor {lacks}), or none that is read here: {_INSTEAD}"
        )


def has_block(target: str, *, cache_dir: str | None) -> bool:
    """Return whether a target's checkpoint holds a block that drafts, from the headers of its files.

    Raises: ModelError if they cannot be read, or hold a block that cannot be run.
    """
    with quiet():
        source = find_source(target, cache_dir)
        with explained(source, "the weights of {} cannot be read"):
            if source.gguf is not None:
                return source.gguf.has_block
            return source.is_folder and has_folder_block(Path(source.path))


def is_block_file(draft: str, *, cache_dir: str | None) -> bool:
    """Return whether a draft model is a GGUF file of a block alone, for a target in other files.

    One that is not there is none: it is refused when it is loaded. Raises: ModelError if it cannot be read.
    """
    if draft == OWN_BLOCK or not (expanded(draft).exists() or hub_file(draft) is not None):
        return False
    with quiet():
        source = find_source(draft, cache_dir)
        with explained(source, "the weights of {} cannot be read"):
            return source.gguf is not None and source.gguf.is_block_alone


def is_state_drafter(draft: str, *, cache_dir: str | None) -> bool:
    """Return whether a draft model is made for one target: `is_head`, `is_fused` or `is_block_file`.

    Raises: ModelError if it cannot be read.
    """
    return is_head(draft) or is_fused(draft) or is_block_file(draft, cache_dir=cache_dir)


def load_state_drafter(
    name: str, target: RowRunner | None, *, dtype: str, cache_dir: str | None, head: Weight | None = None
) -> StateDrafter:
    """Load a block or a head; arguments and errors as of `load_block`, `load_head` and `load_fused`."""
    if is_head(name):
        return load_head(name, target, dtype=dtype, cache_dir=cache_dir)
    if is_fused(name):
        return load_fused(name, target, dtype=dtype)
    return load_block(name, target, dtype=dtype, cache_dir=cache_dir, head=head)


def load_block(
    name: str, target: RowRunner | None, *, dtype: str, cache_dir: str | None, head: Weight | None = None
) -> DraftBlock:
    """Load a block for the target that was loaded from the same checkpoint, or that its file is made for.

    Args:
        name: of the target, for which `has_block`, or a draft model that `is_block_file`.
        dtype: of the draft model, as of `card.models.loading.load_decoder`.
        head: the target's weights, from which the block may take some rows; None: as the file named has them.
    Raises: ModelError, one line, if it cannot be run.
    """
    if not isinstance(target, ExactRunner):
        raise ModelError(
            f"{named('draft')} {OWN_BLOCK} needs a target that runs in our own pass on a CPU, and {name} does not: "
            f"{_INSTEAD}"
        )
    with quiet():
        source = find_source(name, cache_dir)
        with explained(source, f"the block of {{}} cannot draft ({_INSTEAD})"):
            lent, wanted = replace(target.lent, head_weight=head), parse_dtype(dtype)
            if source.gguf is not None and source.gguf.is_block_alone:
                _check_layers(source.gguf, target)
            if source.gguf is None:
                block = read_folder_block(Path(source.path), lent, dtype=wanted)
            else:
                as_stored = runs_as_blocks(source.gguf, dtype, CPU)
                block = read_gguf_block(source.gguf, lent, dtype=wanted, as_stored=as_stored)
    block.computes_int8 = dtype == INT8
    return block


def _check_layers(file: GgufSource, target: ExactRunner) -> None:
    """Check that the file of a block is for a model of as many layers as its target. Raises: BlockError."""
    num_layers = target.original.num_layers
    if file.block_layer != num_layers:
        raise BlockError(f"it is made for a model of {file.block_layer} layers, and the target has {num_layers}")


def is_head(draft: str | LoadedModel | None) -> bool:
    """Return whether a draft model is an EAGLE-3 head; one on the hub is not looked at."""
    if not isinstance(draft, str):
        return isinstance(draft, EagleHead)
    place = expanded(draft)  # one that is not there is refused when it is loaded
    try:
        return is_eagle_folder(place) if place.is_dir() else place.is_file() and is_eagle_gguf(place)
    except OSError:  # likewise
        return False


def is_fused(draft: str | LoadedModel | None) -> bool:
    """Return whether a draft model is a folder that `card train hivis` wrote."""
    if not isinstance(draft, str):
        return isinstance(draft, FusedHead)
    return is_fused_folder(expanded(draft))


def needs_states(draft: str | LoadedModel | None) -> bool:
    """Return whether a draft model reads its target's hidden states. Raises: ModelError as `wants_states`."""
    is_made_for_one = draft == OWN_BLOCK or is_head(draft) or is_fused(draft)
    return draft is not None and (is_made_for_one or wants_states(draft))


def load_head(name: str, target: RowRunner | None, *, dtype: str, cache_dir: str | None) -> EagleHead:
    """Load a head, for which `is_head` holds, for its target.

    Args:
        dtype: of the draft model, as of `card.models.loading.load_decoder`.
    Raises: ModelError, one line, if it cannot be run.
    """
    if not isinstance(target, ExactRunner):
        raise ModelError(
            f"{name} is an EAGLE-3 head, which needs a target that runs in our own pass on a CPU, in the same process: "
            f"{_INSTEAD}"
        )
    with quiet():
        source = find_source(name, cache_dir)
        with explained(source, f"{{}} cannot draft ({_OTHER_HEAD})"):
            head = _read_head(source, target, parse_dtype(dtype))
    head.computes_int8 = dtype == INT8
    return head


def load_fused(name: str, target: RowRunner | None, *, dtype: str) -> FusedHead:
    """Load a drafter for which `is_fused` holds, for its target.

    Args:
        dtype: "auto" takes that of the folder.
    Raises: ModelError, one line, for a damaged folder, or one that was trained for another target.
    """
    if target is None:
        raise ModelError(f"{name} drafts from its target's states, in the same process: {_INSTEAD}")
    file, wanted = expanded(name) / FUSED_WEIGHTS, parse_dtype(dtype)
    facts, probe = FUSED_FILE.load(file, lambda said, arrays: (FusedFacts.of(said), arrays["probe"]))
    FUSED_FILE.check_made_for("target", name, target_difference(facts, target, probe.astype(np.float32)))

    def made(said: Mapping[str, str], arrays: Mapping[str, Array]) -> FusedHead:
        stored = arrays["norm.weight"].dtype if wanted == AUTO else STORED_DTYPES[wanted]
        return fused_head(facts, arrays, target.embeddings, max_model_len=target.max_model_len, dtype=stored)

    drafter = FUSED_FILE.load(file, made)
    drafter.computes_int8 = dtype == INT8
    return drafter


def _read_head(source: Source, target: ExactRunner, dtype: str) -> EagleHead:
    original = target.original
    facts_of_target = HeadTarget(original.num_layers, original.hidden_size, target.max_model_len, target.lent)
    folder = Path(source.path)
    if source.gguf is not None:
        facts, tensors, stored = read_eagle_gguf(folder, dtype)
        try:
            return eagle_head(facts, tensors, facts_of_target, stored)
        except BlockError as error:
            raise BlockError(in_file_words(str(error))) from None
    facts = read_facts(folder)
    tensor_shapes(folder)  # tells which file is cut off or damaged
    files = tuple(MappedWeights(file) for file in weight_files(folder))
    tensors = {name: array for file in files for name, array in file.arrays.items()}
    if not files:
        tensors = torch_module("transformers.pickled", "a head whose weights are pickles").read_pickled(folder)
    if FC not in tensors:
        raise BlockError(f"its tensor {FC} is missing")
    wanted = STORED_DTYPES[tensors[FC].dtype.name if dtype == AUTO else dtype]
    made = eagle_head(facts, tensors, facts_of_target, wanted)
    made.pages = files
    return made
