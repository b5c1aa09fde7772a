"""Candidates of a draft: they are ranked as the target chooses, with the log-probabilities of that choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from card.config import SamplingRule
from card.models.candidate_scorer import CandidateScorer
from card.tree.filters import filter_logits
from card.tree.noise import GumbelNoise
from card.tree.sampling import CHOICE_SHARPNESS, Sampler
from tests.examples import settings
from tests.sampling_laws import GREEDY, PLAIN, batches, clear_law, rules

LOGITS = [0.3, -0.6, 1.1, 0.0, -1.4]


@given(logits=batches(), rule=rules | st.just(GREEDY), coupled=st.booleans(), count=st.integers(1, 50))
def test_candidates_are_the_best_first_with_normalised_logprobs(
    logits: Any, rule: SamplingRule, coupled: bool, count: int
) -> None:
    logits = np.asarray(logits)
    num_rows, vocab_size = logits.shape
    scorer = CandidateScorer(rule, vocab_size, coupled=coupled)
    every_token, every_logprob = scorer.top(logits, range(num_rows), vocab_size)
    tokens, logprobs = torch.tensor(every_token), torch.tensor(every_logprob)
    assert (logprobs <= 0).all()
    assert (logprobs[:, :-1] >= logprobs[:, 1:]).all()
    assert [sorted(row) for row in tokens.tolist()] == [list(range(vocab_size))] * num_rows
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(num_rows))
    _, few = scorer.top(logits, range(num_rows), count)
    assert few == [row[:count] for row in every_logprob]


@given(row=st.lists(st.integers(-400, 400), min_size=5, max_size=5, unique=True), rule=rules)
def test_uncoupled_logprobs_are_those_of_the_law(row: list[int], rule: SamplingRule) -> None:
    logits = [n / 50 for n in row]
    law = clear_law(logits, rule)
    tokens, logprobs = CandidateScorer(rule, 5, coupled=False).top(np.array([logits], np.float32), [3], 5)
    for token, logprob in zip(tokens[0], logprobs[0], strict=True):
        assert math.exp(logprob) == pytest.approx(law[token], abs=1e-5)


@given(row=st.lists(st.integers(-400, 400), min_size=5, max_size=5, unique=True), coupled=st.booleans())
def test_greedy_logprobs_are_those_of_the_sharpened_softmax(row: list[int], coupled: bool) -> None:
    logits = torch.tensor([row]) / 50
    tokens, logprobs = map(torch.tensor, CandidateScorer(GREEDY, 5, coupled=coupled).top(logits.numpy(), [3], 5))
    torch.testing.assert_close(logprobs, (logits * CHOICE_SHARPNESS).log_softmax(-1).gather(-1, tokens))


@settings(max_examples=100)
@given(logits=batches(), rule=rules, first=st.integers(0, 10**6))
def test_first_coupled_candidate_is_what_the_target_would_choose(logits: Any, rule: SamplingRule, first: int) -> None:
    logits = np.asarray(logits)
    positions = range(first, first + len(logits))
    scorer = CandidateScorer(rule, logits.shape[1], coupled=True)
    tokens, logprobs = map(torch.tensor, scorer.top(logits, positions, 2))
    assert tokens[:, 0].tolist() == Sampler(rule, logits.shape[1]).choose(logits, positions)
    noise = GumbelNoise(rule.seed, logits.shape[1])
    scores = filter_logits(logits, rule) + np.stack([noise.row(position) for position in positions])
    sharpened = torch.from_numpy(scores * CHOICE_SHARPNESS)
    torch.testing.assert_close(logprobs, sharpened.log_softmax(-1).topk(min(2, logits.shape[1])).values)


def test_uncoupled_candidates_ignore_the_noise() -> None:
    logits = np.array([LOGITS], np.float32)
    scorer = CandidateScorer(PLAIN, 5, coupled=False)
    assert {tuple(scorer.top(logits, [position], 5)[0][0]) for position in range(20)} == {(2, 0, 3, 1, 4)}


@pytest.mark.parametrize("rule", [GREEDY, PLAIN])
@pytest.mark.parametrize("coupled", [False, True])
def test_logprobs_keep_the_precision_of_float64(rule: SamplingRule, coupled: bool) -> None:
    logits = np.array([[0.0, 1e-12]])
    _, logprobs = CandidateScorer(rule, 2, coupled=coupled).top(logits, [0], 2)
    assert logprobs[0][0] > logprobs[0][1]
