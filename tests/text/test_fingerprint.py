"""A fingerprint tells tokenizers apart exactly where a pair of models must not differ."""

from __future__ import annotations

import pytest

from card.models.loading import load_tokenizer
from card.text.fit import tokenizer_fingerprint
from tests.pair import Pair


def test_tokenizers_have_one_fingerprint_if_each_id_means_the_same(pair: Pair) -> None:
    target, draft, foreign = (
        tokenizer_fingerprint(load_tokenizer(name)) for name in (pair.target, pair.draft, pair.foreign_draft)
    )
    assert target == draft
    assert target != foreign


@pytest.mark.parametrize("change", ["bos_token", "eos_token", "tokens"])
def test_any_difference_that_matters_changes_it(pair: Pair, change: str) -> None:
    tokenizer = load_tokenizer(pair.target)
    before = tokenizer_fingerprint(tokenizer)
    if change == "tokens":
        tokenizer.backend_tokenizer.add_tokens(["new"])
    else:
        tokenizer.special_tokens_map[change] = "<|turn|>"
    assert tokenizer_fingerprint(tokenizer) != before
