"""Load the block that drafts inside a target's checkpoint. Errors are one clear line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from card.config import INT8
from card.errors import ModelError, named
from card.models.dtypes import CPU, parse_dtype, runs_as_blocks
from card.models.files.places import hub_file, local_model
from card.models.files.sources import explained, find_source, quiet
from card.models.names import OWN_BLOCK
from card.models.own.decoder_model import LoadedModel
from card.models.own.draft_block import DraftBlock, has_folder_block, read_folder_block, read_gguf_block
from card.models.own.layers import Weight
from card.models.runner import ExactRunner, RowRunner

_INSTEAD = f"name a draft model, or leave {named('draft')} out"


def require_block(target: str | LoadedModel, *, cache_dir: str | None) -> None:
    """Check that a target's checkpoint holds a block that drafts, without reading its weights.

    Raises: ModelError that says what to do instead.
    """
    if not isinstance(target, str):
        raise ModelError(f"{named('draft')} {OWN_BLOCK} is read from the target's files: give the target by name")
    if not has_block(target, cache_dir=cache_dir):
        raise ModelError(
            f"{target} holds no block that drafts (no tensor mtp.fc.weight or nextn.eh_proj), or none that is read "
            f"here: {_INSTEAD}"
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

    Raises: ModelError if it cannot be read.
    """
    if draft == OWN_BLOCK or (local_model(draft) is None and hub_file(draft) is None):
        return False
    with quiet():
        source = find_source(draft, cache_dir)
        with explained(source, "the weights of {} cannot be read"):
            return source.gguf is not None and source.gguf.is_block_alone


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
            if source.gguf is None:
                block = read_folder_block(Path(source.path), lent, dtype=wanted)
            else:
                as_stored = runs_as_blocks(source.gguf, dtype, CPU)
                block = read_gguf_block(source.gguf, lent, dtype=wanted, as_stored=as_stored)
    block.computes_int8 = dtype == INT8
    return block
