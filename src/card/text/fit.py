"""Tokenizers of two models compared: each token id must mean the same to both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from card.errors import VocabularyError
from card.text.tokenizer import Tokenizer


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Return a short text that two tokenizers share exactly if each token id, bos and eos mean the same to both."""
    tokens = sorted(tokenizer.get_vocab().items())
    facts = json.dumps([tokens, tokenizer.bos_token, tokenizer.eos_token])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def check_tokenizers_fit(
    target_tokenizer: Tokenizer,
    draft_tokenizer: Tokenizer,
    target_vocab_size: int,
    draft_vocab_size: int,
    *,
    may_lack: bool = False,
) -> None:
    """Check that each token id means the same to both models.

    Rows of an embedding beyond the tokenizer's last id only pad it and may differ in number.

    Args:
        target_vocab_size, draft_vocab_size: rows of the models' embeddings.
        may_lack: the draft may lack tokens of the target, such as those that stand for images.
    Raises: VocabularyError that names the first difference: a token, their number, the bos or eos token, or an id for
        which a model has no row.
    """
    target_tokens = target_tokenizer.get_vocab()
    draft_tokens = target_tokens if draft_tokenizer is target_tokenizer else draft_tokenizer.get_vocab()
    if target_tokens != draft_tokens and not (may_lack and draft_tokens.items() <= target_tokens.items()):
        raise VocabularyError(
            f"{_first_difference(target_tokens, draft_tokens)}; use two models that share one tokenizer"
        )
    for name in ("bos", "eos"):
        in_target, in_draft = (getattr(t, f"{name}_token") for t in (target_tokenizer, draft_tokenizer))
        if in_target != in_draft:
            raise VocabularyError(
                f"the {name} token is {in_target!r} in the target's tokenizer and {in_draft!r} in the draft's; "
                "use two models of one kind (both chat models, or neither)"
            )
    for role, vocab_size, tokens in (
        ("target", target_vocab_size, target_tokens),
        ("draft", draft_vocab_size, draft_tokens),
    ):
        num_ids = max(tokens.values(), default=-1) + 1
        if vocab_size < num_ids:
            raise VocabularyError(
                f"the {role} model has {vocab_size} embedding rows, its tokenizer has ids up to {num_ids - 1}; "
                "use the tokenizer that belongs to the model"
            )


def _first_difference(target_tokens: Mapping[str, int], draft_tokens: Mapping[str, int]) -> str:
    target_by_id = {token_id: token for token, token_id in target_tokens.items()}
    draft_by_id = {token_id: token for token, token_id in draft_tokens.items()}
    differing = (i for i in target_by_id.keys() | draft_by_id.keys() if target_by_id.get(i) != draft_by_id.get(i))
    token_id = min(differing, default=None)
    if token_id is None:  # one tokenizer has two names for an id
        return f"the target's tokenizer has {len(target_tokens)} tokens, the draft's has {len(draft_tokens)}"
    if token_id in target_by_id and token_id in draft_by_id:
        in_target, in_draft = target_by_id[token_id], draft_by_id[token_id]
        return f"token {token_id} is {in_target!r} in the target's tokenizer and {in_draft!r} in the draft's"
    owner = "target" if token_id in target_by_id else "draft"
    token = target_by_id.get(token_id, draft_by_id.get(token_id))
    return (
        f"the target's tokenizer has {len(target_tokens)} tokens, the draft's has {len(draft_tokens)}: "
        f"only the {owner}'s has token {token_id} ({token!r})"
    )
