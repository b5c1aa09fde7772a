"""Kept parts of the header of a file with a block that drafts: the next one need not read the header again.

A header has some hundred thousand tokens, which take longer to read than the weights of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from card.models.architectures import find_architecture
from card.models.files.gguf.header import Header, TensorPlace
from card.models.files.gguf.model import GgufHeader
from card.models.own.plain_config import config_of

_HEAD = "output.weight"


def kept_block(read: GgufHeader) -> dict[str, Any] | None:
    """Return the places of a block's tensors, for JSON; None if there is no block."""
    if not read.has_block:
        return None
    ends = (f"{read.architecture.last_norm[1]}.weight", _HEAD)
    return {
        "num_bytes": read.header.num_bytes,
        "drafting": _stated(read.drafting),
        "ends": _stated(read.header.tensors[name] for name in ends if name in read.header.tensors),
        "kept": _stated([] if read.kept is None else [read.kept]),
        "is_alone": read.is_block_alone,
    }


def header_of_block(kept: Mapping[str, Any], config: Mapping[str, Any]) -> GgufHeader:
    """Return what `kept_block` was made of, as far as `block_of` and `read_kept_ids` need it.

    Args:
        config: of the model, or of the block if it is alone.
    """
    architecture, plain = find_architecture(config["model_type"]), config_of(config)
    assert architecture is not None
    assert plain is not None
    drafting, ends, (*ids,) = (_places(kept[name]) for name in ("drafting", "ends", "kept"))
    names = [place.name for place in (*drafting, *ends)]
    return GgufHeader(
        Header({}, {place.name: place for place in ends}, kept["num_bytes"]),
        drafting,
        architecture.as_stored(names),
        dict(config),
        plain,
        kept["is_alone"],
        ids[0] if ids else None,
    )


def head_place(header: GgufHeader) -> TensorPlace | None:
    """Return the head that stands apart from the embeddings; None if there is none."""
    return None if header.config["tie_word_embeddings"] else header.header.tensors.get(_HEAD)


def _stated(places: Iterable[TensorPlace]) -> list[list[Any]]:
    return [[one.name, one.shape, one.type_id, one.offset, str(one.file.resolve())] for one in places]


def _places(stated: Iterable[list[Any]]) -> list[TensorPlace]:
    return [TensorPlace(name, tuple(shape), kind, offset, Path(file)) for name, shape, kind, offset, file in stated]
