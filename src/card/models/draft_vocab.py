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
from card.models.loaded_model import LoadedModel
from card.models.own.decoder_model import DecoderModel
from card.models.rows.row_tree import IntArray
from card.models.token_ranks import used_ids
from card.text.tokenizer import Tokenizer

_MARK = "head_ids"
USUAL_TOKENS = 32_768  # that a draft model proposes by itself; see the README of the folder `classic`
COUNTED_SHARE = 0.9  # of these that must have been counted; the first ids make up the rest. Mistral's have 0.98
M = TypeVar("M", bound=LoadedModel)


def first_used(vocabulary: Mapping[str, int], num_tokens: int) -> list[int]:
    """Return the ids of so many tokens of a vocabulary: those that texts use most, then the first ones."""
    return list(dict.fromkeys([*used_ids(vocabulary), *sorted(vocabulary.values())]))[:num_tokens]


def always_drafted(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of special and added tokens, which are rare in texts and yet begin and end them."""
    return tuple(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))


def check_draft_vocab(num_tokens: int | None, tokenizer: Tokenizer) -> None:
    """Check that there are so many tokens, if a number is asked for. Raises: SettingsError."""
    if num_tokens is not None and num_tokens > len(tokenizer):
        raise SettingsError(
            f"{named('draft_vocab')} must be 1 to {len(tokenizer)}, the number of tokens there are, got {num_tokens}"
        )


def drafted_ids(tokenizer: Tokenizer | None, num_tokens: int) -> tuple[int, ...] | None:
    """Return the ids of so many tokens and of `always_drafted`; without a tokenizer the first so many. None: all."""
    if tokenizer is None:
        return tuple(range(num_tokens))
    if num_tokens >= len(tokenizer):
        return None
    used = first_used(tokenizer.get_vocab(), num_tokens)
    return tuple(sorted({*used, *always_drafted(tokenizer)}))


def usual_ids(tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """Return the ids of the `USUAL_TOKENS` that texts use most, and of `always_drafted`.

    None: too few tokens of this vocabulary were counted in texts (`COUNTED_SHARE`), or it is hardly larger.
    """
    num_counted = len(used_ids(tokenizer.get_vocab()))
    if len(tokenizer) < 2 * USUAL_TOKENS or num_counted < COUNTED_SHARE * USUAL_TOKENS:
        return None
    return drafted_ids(tokenizer, USUAL_TOKENS)


def restrict_head(model: LoadedModel, ids: Iterable[int]) -> LoadedModel:
    """Return the model with a head that knows these tokens only, as far as it has them.

    The weights are those of ``model``, which itself stays as it is. Raises: SettingsError if its head knows none.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    known = {one for one in ids if one < vocab_size}
    outputs = model.output_ids if isinstance(model, DecoderModel) else None
    if outputs is not None and known.isdisjoint(outputs.tolist()):
        raise SettingsError(
            f"{named('draft_vocab')} leaves this drafter none of its {len(outputs)} tokens; ask for more or none"
        )
    return with_head_of(model, known) if len(known) < vocab_size else copy.copy(model)


def with_head_of(model: M, ids: Iterable[int]) -> M:
    """Return the model with a head that knows these tokens only; otherwise as `restrict_head`."""
    restricted = copy.copy(model)
    setattr(restricted, _MARK, np.array(sorted(ids), np.int64))
    return restricted


def kept_ids(model: LoadedModel) -> IntArray | None:
    """Return the tokens that a restricted head knows; None: all."""
    token_ids: IntArray | None = getattr(model, _MARK, None)
    return token_ids


def head_channels(model: DecoderModel) -> IntArray | None:
    """Return the outputs of a model's head that a restricted one computes; None: it is not restricted."""
    chosen, ids = kept_ids(model), model.output_ids
    return chosen if chosen is None or ids is None else np.flatnonzero(np.isin(ids, chosen))


def proposed_by(model: DecoderModel) -> IntArray | None:
    """Return the tokens that a model's head gives numbers for, restricted or not; None: all in order."""
    channels, ids = head_channels(model), model.output_ids
    return channels if ids is None else ids if channels is None else ids[channels]
