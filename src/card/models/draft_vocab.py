"""A draft model whose head knows a part of the vocabulary: drafting costs less where the head is most of a small model.

What is left out is never proposed; the target writes it as it writes any token that nobody proposed. Byte-level
vocabularies are ordered by frequency, so their first tokens are the common ones.
Source of the idea: Zhao et al. 2025, "FR-Spec", arXiv:2502.14856.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from card.errors import SettingsError
from card.models.own.block_layers import BlockLinear
from card.models.own.decoder_model import linear_of
from card.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel

_MARK = "head_ids"


def always_drafted(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of special and added tokens, which are rare in texts and yet begin and end them."""
    return tuple(sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}))


def check_draft_vocab(num_tokens: int | None, tokenizer: Tokenizer) -> None:
    """Check that so many tokens are a part of the vocabulary; None is all. Raises: SettingsError."""
    if num_tokens is not None and num_tokens >= len(tokenizer):
        raise SettingsError(
            f"draft_vocab must be below {len(tokenizer)}, the number of tokens there are, got {num_tokens}"
        )


def restrict_head(model: LoadedModel, num_tokens: int, more_ids: Iterable[int]) -> LoadedModel:
    """Return the model with a head that knows the first ``num_tokens`` tokens and ``more_ids`` only.

    The weights are those of ``model``, which itself stays as it is.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = {*range(min(num_tokens, vocab_size)), *(one for one in more_ids if one < vocab_size)}
    restricted = copy.copy(model)
    if len(ids) < vocab_size:
        setattr(restricted, _MARK, torch.tensor(sorted(ids), device=model.device))
    return restricted


def head_of(model: LoadedModel) -> tuple[nn.Linear | BlockLinear, Tensor | None]:
    """Return the head to be computed, and the tokens that its outputs are for; None: all in order."""
    head, ids = model.lm_head, getattr(model, _MARK, None)
    if ids is None:
        return head, None
    if isinstance(head, BlockLinear):
        return head.select(ids), ids
    bias = None if head.bias is None else nn.Parameter(head.bias.detach()[ids], requires_grad=False)
    return linear_of(nn.Parameter(head.weight.detach()[ids], requires_grad=False), bias), ids


def spread(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits [rows, V] of those [rows, len(ids)] that were computed; others are minus infinity."""
    if ids is None:
        return logits
    return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, ids, logits)


def masked(logits: Tensor, model: LoadedModel) -> Tensor:
    """Return logits [rows, V] of a whole head as a restricted one would give them."""
    ids = getattr(model, _MARK, None)
    return logits if ids is None else spread(logits[:, ids], ids, logits.shape[1])
