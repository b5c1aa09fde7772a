"""Stored texts: a seed gives the same tokens from one version to the next, whatever computes the laws."""

from __future__ import annotations

from typing import Any

import pytest

from card.config import SamplingParams
from tests.decoding import decode
from tests.toy import TableModel

PROMPT = (3, 271, 40, 12, 3)
# Written when torch computed filters, penalties and choices. They change only if the meaning of a seed does.
TEXTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "greedy": (
        {"temperature": 0.0},
        [233, 116, 31, 233, 94, 248, 15, 251, 59, 22, 277, 51, 212, 16, 193, 246, 126, 83, 260, 42],
    ),
    "temperature": (
        {"temperature": 0.7},
        [233, 116, 31, 156, 268, 119, 286, 269, 237, 49, 17, 69, 197, 84, 130, 269, 162, 181, 70, 283],
    ),
    "hot": (
        {"temperature": 1.7},
        [233, 116, 213, 107, 292, 276, 135, 274, 67, 108, 23, 241, 271, 84, 29, 133, 180, 293, 285, 277],
    ),
    "top-k": (
        {"temperature": 1.0, "top_k": 5},
        [233, 116, 31, 105, 242, 154, 135, 56, 72, 193, 7, 172, 263, 96, 63, 208, 164, 171, 238, 46],
    ),
    "top-p": (
        {"temperature": 1.0, "top_p": 0.8},
        [233, 116, 31, 156, 268, 119, 24, 99, 132, 179, 153, 187, 14, 30, 116, 227, 265, 162, 234, 158],
    ),
    "min-p": (
        {"temperature": 1.3, "min_p": 0.1},
        [233, 116, 31, 156, 268, 119, 24, 99, 132, 181, 93, 33, 50, 39, 80, 77, 84, 37, 102, 95],
    ),
    "all cuts": (
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        [233, 116, 31, 156, 268, 119, 24, 99, 162, 284, 183, 281, 195, 94, 118, 220, 86, 87, 110, 227],
    ),
    "penalties": (
        {"temperature": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        [233, 116, 31, 156, 268, 119, 24, 99, 67, 195, 265, 223, 146, 84, 29, 133, 180, 293, 285, 277],
    ),
    "penalties, greedy": (
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        [233, 116, 31, 217, 195, 4, 193, 78, 30, 210, 94, 194, 232, 156, 143, 41, 102, 107, 221, 254],
    ),
    "biases": (
        {"temperature": 1.0, "logit_bias": {3: 4.5, 40: 5.0, 271: -20.0}},
        [233, 116, 31, 2, 83, 41, 153, 229, 49, 283, 23, 138, 267, 268, 3, 233, 3, 160, 138, 33],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_seed_gives_the_tokens_that_it_has_always_given(name: str) -> None:
    settings, expected = TEXTS[name]
    target = TableModel(7, vocab_size=300, order=2, spread=1.5)
    params = SamplingParams(seed=11, max_tokens=20, **settings)
    token_ids, _, _ = decode(target, None, method="vanilla", params=params, prompt=PROMPT)
    assert token_ids == expected
