"""A draft model whose head knows a part of the vocabulary: drafting costs less where the head is most of a small model.

The other tokens are never proposed; the target alone writes them. Those that texts use most are known, besides special
ones.
Source of the idea: Zhao et al. 2025, "FR-Spec", arXiv:2502.14856.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

from card.errors import SettingsError, named
from card.kernels.number_types import Floats, empty
from card.models.own.decoder_model import DecoderModel, LoadedModel
from card.models.own.layers import Linear
from card.models.rows.row_tree import IntArray
from card.models.token_ranks import used_ids
from card.text.tokenizer import Tokenizer

_MARK = "head_ids"
BLOCK_TOKENS = 32_768  # that a block proposes unless something else is asked for, where there are twice as many or more
M = TypeVar("M", bound=LoadedModel)


def first_used(vocabulary: Mapping[str, int], num_tokens: int) -> list[int]:
    """Return the ids of so many tokens of a vocabulary: those that texts use most, then the first ones."""
    return list(dict.fromkeys([*used_ids(vocabulary), *sorted(vocabulary.values())]))[:num_tokens]


def always_drafted(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of special and added tokens, which are rare in texts and yet begin and end them."""
    return tuple(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))


def check_draft_vocab(num_tokens: int | None, tokenizer: Tokenizer) -> None:
    """Check that so many tokens are a part of the vocabulary; None is all. Raises: SettingsError."""
    if num_tokens is not None and num_tokens >= len(tokenizer):
        raise SettingsError(
            f"{named('draft_vocab')} must be below {len(tokenizer)}, the number of tokens there are, got {num_tokens}"
        )


def drafted_ids(tokenizer: Tokenizer | None, num_tokens: int) -> tuple[int, ...]:
    """Return the ids of so many tokens and of `always_drafted`; without a tokenizer the first so many."""
    if tokenizer is None:
        return tuple(range(num_tokens))
    used = first_used(tokenizer.get_vocab(), num_tokens)
    return tuple(sorted({*used, *always_drafted(tokenizer)}))


def restrict_head(model: LoadedModel, ids: Iterable[int]) -> LoadedModel:
    """Return the model with a head that knows these tokens only, as far as it has them.

    The weights are those of ``model``, which itself stays as it is. Raises: SettingsError if its head knows none.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    known = {one for one in ids if one < vocab_size}
    own = model.output_ids if isinstance(model, DecoderModel) else None
    if own is not None and known.isdisjoint(own.tolist()):
        raise SettingsError(
            f"{named('draft_vocab')} leaves this drafter none of its {len(own)} tokens; ask for more, or leave it out"
        )
    return with_head_of(model, known) if len(known) < vocab_size else copy.copy(model)


def with_head_of(model: M, ids: Iterable[int]) -> M:
    """Return the model with a head that knows these tokens only; otherwise as `restrict_head`."""
    restricted = copy.copy(model)
    setattr(restricted, _MARK, np.array(sorted(ids), np.int64))
    return restricted


def kept_ids(model: LoadedModel) -> IntArray | None:
    """Return the tokens that a restricted head knows; None: all."""
    found: IntArray | None = getattr(model, _MARK, None)
    return found


def proposed_by(model: DecoderModel) -> IntArray | None:
    """Return the tokens that a model's head gives numbers for, restricted or not; None: all in order."""
    kept, own = kept_ids(model), model.output_ids
    return kept if own is None else own if kept is None else own[np.isin(own, kept)]


def head_of(model: DecoderModel) -> tuple[Linear, IntArray | None]:
    """Return the head to be computed, and the tokens that its outputs are for; None: all in order."""
    kept, own, ids = kept_ids(model), model.output_ids, proposed_by(model)
    if kept is None:
        return model.lm_head, ids
    return model.lm_head.select(kept if own is None else np.flatnonzero(np.isin(own, kept))), ids


def spread(logits: Floats, ids: IntArray | None, vocab_size: int) -> Floats:
    """Return logits [rows, V] of those [rows, len(ids)] that were computed; others are minus infinity."""
    if ids is None:
        return logits
    whole = empty((len(logits), vocab_size))
    whole.fill(-np.inf)
    whole[:, ids] = logits
    return whole
