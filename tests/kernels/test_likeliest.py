"""The likeliest tokens of rows: those of torch, whatever the size of the vocabulary and whatever is ruled out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.kernels.likeliest import likeliest


@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(0, 3),
    vocab_size=st.sampled_from([1, 5, 16, 63, 64, 65, 200, 1000]),
    count=st.integers(1, 70),
    ruled_out=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_tokens_and_logprobs_are_those_of_torch(
    seed: int, num_rows: int, vocab_size: int, count: int, ruled_out: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 5 * torch.randn(num_rows, vocab_size + 3, generator=generator)[:, :vocab_size]
    scores[:, 1:][torch.rand(num_rows, vocab_size - 1, generator=generator) < ruled_out] = -math.inf
    size = min(count, vocab_size)
    tokens, logprobs = (torch.tensor(found).view(-1, size) for found in likeliest(scores.numpy(), count, sharpness=1.5))
    theirs = (1.5 * scores).log_softmax(-1)
    torch.testing.assert_close(logprobs, theirs.topk(size).values, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(logprobs, theirs.gather(-1, tokens.long()), atol=5e-6, rtol=1e-6)
    assert all(len(set(row)) == len(row) for row in tokens.tolist())


def test_of_equal_tokens_the_first_comes_first() -> None:
    scores = np.zeros((1, 200), np.float32)
    scores[0, [7, 70, 150]] = 1.0
    assert likeliest(scores, 6)[0] == [[7, 70, 150, 0, 1, 2]]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 70, 99])
def test_a_row_with_a_score_that_is_no_number_has_no_logprobs(wrong: float, place: int) -> None:
    scores = np.zeros((2, 100), np.float32)
    scores[0, place] = wrong
    assert [all(map(math.isnan, row)) for row in likeliest(scores, 4)[1]] == [True, False]


def test_a_row_that_rules_every_token_out_has_no_logprobs() -> None:
    assert all(map(math.isnan, likeliest(np.full((1, 100), -math.inf, np.float32), 4)[1][0]))
