"""Extensions of a pass: what makes them well-formed, and which of its rows are theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import Floats
from card.models.images import ImageRows
from card.models.protocol import Extension
from card.models.rows.kv_layout import KVLayout
from card.models.rows.row_tree import IntArray, RowTree


def require_well_formed(extensions: Sequence[Extension]) -> None:
    """Raise ModelError if a slot is named twice, or numbers of an extension do not fit each other."""
    if len({extension.slot for extension in extensions}) < len(extensions):
        raise ModelError(f"a slot is named twice in one pass: {[extension.slot for extension in extensions]}")
    for extension in extensions:
        num_new = len(extension.token_ids)
        if not num_new or len(extension.parents) != num_new or not 0 <= extension.first_logits_idx <= num_new:
            raise ModelError(
                f"slot {extension.slot}: {num_new} tokens, {len(extension.parents)} parents and first_logits_idx"
                f" {extension.first_logits_idx} do not fit; there must be 1 token or more, a parent for each, and"
                " an index from 0 to their number"
            )


def require_selectable(extension: Extension, tree: RowTree, layout: KVLayout) -> None:
    """Raise ModelError unless an extension that reads chosen rows hangs below the last of a chain, and the rows fit."""
    reads, start = extension.reads, tree.num_rows
    if reads is None:
        return
    layers, heads = len(layout.layers), layout.shape.num_kv_heads
    hangs_below = tree.num_prefix_rows == start and min(extension.parents) >= start - 1
    fits = reads.rows.shape[:2] == (layers, heads) and reads.rows.max(initial=-1) < reads.since <= start
    if not (hangs_below and fits and extension.scores is None):
        raise ModelError(
            f"slot {extension.slot}: rows {reads.rows.shape} below {reads.since} were chosen to be read; they must"
            f" be [{layers}, {heads}, N] of the {start} that it holds, by tokens below the last of a chain, and"
            " no scores may be kept"
        )


def token_ids_of(extensions: Sequence[Extension], num_known: int) -> IntArray:
    """Return all token ids of a pass, [sum T]. Raises: ModelError if one is outside the vocabulary."""
    token_ids = [token_id for extension in extensions for token_id in extension.token_ids]
    if min(token_ids) < 0 or max(token_ids) >= num_known:
        wrong = [token_id for token_id in token_ids if not 0 <= token_id < num_known]
        raise ModelError(
            f"token ids {wrong[:5]} are outside the model's vocabulary of {num_known};"
            " use the tokenizer that belongs to the model"
        )
    return np.array(token_ids, np.int64)


def logits_rows_of(extensions: Sequence[Extension]) -> IntArray | slice:
    """Return which rows of a pass give logits."""
    if len(extensions) == 1:
        return slice(extensions[0].first_logits_idx, None)
    if not any(extension.first_logits_idx for extension in extensions):
        return slice(None)
    offsets = np.cumsum([0] + [len(extension.token_ids) for extension in extensions])
    rows = [
        np.arange(first + extension.first_logits_idx, last)
        for extension, first, last in zip(extensions, offsets[:-1], offsets[1:], strict=True)
    ]
    return np.concatenate(rows)


def given_rows(extensions: Sequence[Extension]) -> ImageRows:
    """Return the rows of a pass whose inputs are given, with these inputs."""
    rows, inputs, offset = list[IntArray](), list[Floats](), 0
    for extension in extensions:
        if extension.inputs is not None:
            rows.append(np.arange(offset, offset + len(extension.inputs)))
            inputs.append(extension.inputs)
        offset += len(extension.token_ids)
    return ImageRows(np.concatenate(rows), np.concatenate(inputs), None)
