"""A draft model whose head knows a part of the vocabulary: drafting costs less where the head is most of a small model.

The other tokens are never proposed; the target alone writes them. Byte-level vocabularies are ordered by frequency, so
their first tokens are the common ones.
Source of the idea: Zhao et al. 2025, "FR-Spec", arXiv:2502.14856.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np

from card.errors import SettingsError, named
from card.kernels.number_types import Floats, empty
from card.models.own.decoder_model import DecoderModel, LoadedModel
from card.models.own.layers import Linear
from card.models.rows.row_tree import IntArray
from card.text.tokenizer import Tokenizer

_MARK = "head_ids"


def always_drafted(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of special and added tokens, which are rare in texts and yet begin and end them."""
    return tuple(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))


def check_draft_vocab(num_tokens: int | None, tokenizer: Tokenizer) -> None:
    """Check that so many tokens are a part of the vocabulary; None is all. Raises: SettingsError."""
    if num_tokens is not None and num_tokens >= len(tokenizer):
        raise SettingsError(
            f"{named('draft_vocab')} must be below {len(tokenizer)}, the number of tokens there are, got {num_tokens}"
        )


def restrict_head(model: LoadedModel, num_tokens: int, more_ids: Iterable[int]) -> LoadedModel:
    """Return the model with a head that knows the first ``num_tokens`` tokens and ``more_ids`` only.

    The weights are those of ``model``, which itself stays as it is. Raises: SettingsError if its head knows none.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = {*range(min(num_tokens, vocab_size)), *(one for one in more_ids if one < vocab_size)}
    own = model.output_ids if isinstance(model, DecoderModel) else None
    if own is not None and ids.isdisjoint(own.tolist()):
        raise SettingsError(
            f"{named('draft_vocab')} {num_tokens} leaves this drafter none of its {len(own)} tokens; leave it out"
        )
    restricted = copy.copy(model)
    if len(ids) < vocab_size:
        setattr(restricted, _MARK, np.array(sorted(ids), np.int64))
    return restricted


def kept_ids(model: LoadedModel) -> IntArray | None:
    """Return the tokens that a restricted head knows; None: all."""
    found: IntArray | None = getattr(model, _MARK, None)
    return found


def head_of(model: DecoderModel) -> tuple[Linear, IntArray | None]:
    """Return the head to be computed, and the tokens that its outputs are for; None: all in order."""
    ids, own = kept_ids(model), model.output_ids
    if ids is None:
        return model.lm_head, own
    outputs = ids if own is None else np.flatnonzero(np.isin(own, ids))
    return model.lm_head.select(outputs), ids if own is None else own[outputs]


def spread(logits: Floats, ids: IntArray | None, vocab_size: int) -> Floats:
    """Return logits [rows, V] of those [rows, len(ids)] that were computed; others are minus infinity."""
    if ids is None:
        return logits
    whole = empty((len(logits), vocab_size))
    whole.fill(-np.inf)
    whole[:, ids] = logits
    return whole
