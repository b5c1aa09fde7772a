"""Shaped logits: those of a slow reference and of transformers, for every node of a tree as if it were the text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from card.config import Grammar, SamplingParams, ShapingRule
from card.errors import GrammarError, TargetError
from card.kernels.number_types import BFLOAT16
from card.tree.logits import FloatArray
from card.tree.masks import MasksAtOnce, TimeSpent
from card.tree.shaping import Shaping
from tests.shaping import TOY_VOCAB_SIZE, ToyGrammar, shapings, slowly_shaped

PROMPT = (3, 1, 4, 1, 5)
ENDS = frozenset({0, 11})
tokens = st.integers(0, TOY_VOCAB_SIZE - 1)
texts = st.lists(tokens, max_size=8)


def shaping_of(params: SamplingParams, new_ids: list[int], ends: frozenset = ENDS) -> Shaping | None:
    rule = ShapingRule.of(params.resolved(), num_prompt_tokens=len(PROMPT), end_ids=ends)
    return None if rule is None else Shaping(rule, [*PROMPT, *new_ids], TOY_VOCAB_SIZE)


def random_logits(num_rows: int, seed: int, dtype: Any = np.float64) -> FloatArray:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, TOY_VOCAB_SIZE)).astype(dtype)


@given(
    changes=shapings,
    new_ids=texts,
    paths=st.lists(texts, min_size=1, max_size=6),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([np.float64, np.float32, BFLOAT16]),
)
def test_each_row_is_that_of_a_slow_reference_for_its_path(changes, new_ids, paths, seed, dtype):
    params = SamplingParams(max_tokens=99, **changes)
    shaping = shaping_of(params, new_ids)
    logits = random_logits(len(paths), seed, dtype)
    before = logits.copy()
    shaped = logits if shaping is None else shaping.apply(logits, paths)
    expected = [
        slowly_shaped(row, params, PROMPT, [*new_ids, *path], ENDS)
        for row, path in zip(logits.astype(np.float64).tolist(), paths, strict=True)
    ]
    np.testing.assert_allclose(shaped.astype(np.float64), np.array(expected), rtol=1e-5, atol=1e-5)
    assert np.array_equal(logits, before), "the argument is unchanged"


@given(changes=shapings, new_ids=texts, path=texts, seed=st.integers(0, 99))
def test_a_path_counts_bit_for_bit_as_if_it_were_text(changes, new_ids, path, seed):
    params = SamplingParams(max_tokens=99, **changes)
    if (ahead := shaping_of(params, new_ids)) is None:
        return
    logits = random_logits(1, seed, np.float32)
    crowd = [[7, 7], path, [2]]  # other rows change nothing
    as_path = ahead.apply(np.repeat(logits, 3, 0), crowd)[1:2]
    ahead.commit(path)
    as_text = shaping_of(params, [*new_ids, *path])
    assert np.array_equal(as_path, ahead.apply(logits, [()]))
    assert np.array_equal(as_path, as_text.apply(logits, [()]))


def test_parameters_that_shape_nothing_cost_nothing():
    assert shaping_of(SamplingParams(), []) is None
    assert shaping_of(SamplingParams(min_tokens=3), [], ends=frozenset()) is None, "nothing can end the text"
    shaping = shaping_of(SamplingParams(min_tokens=2), [7, 7])
    logits = random_logits(1, 0)
    assert shaping.apply(logits, [()]) is logits, "there are enough tokens"


@pytest.mark.parametrize("new_ids", [[], [7], [5, 7, 7, 0]])
def test_penalties_biases_and_least_lengths_are_those_of_transformers(new_ids):
    ids = torch.tensor([[*PROMPT, *new_ids]])
    logits = random_logits(1, 5, np.float32)
    cases = [
        ({"repetition_penalty": 1.7}, hf.RepetitionPenaltyLogitsProcessor(1.7)),
        ({"repetition_penalty": 0.4}, hf.RepetitionPenaltyLogitsProcessor(0.4)),
        ({"logit_bias": {3: -1.5, 9: 4.0}}, hf.SequenceBiasLogitsProcessor({(3,): -1.5, (9,): 4.0})),
        ({"min_tokens": 3}, hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, sorted(ENDS))),
    ]
    for changes, processor in cases:
        shaped = shaping_of(SamplingParams(**changes), new_ids).apply(logits, [()])
        theirs = processor(ids, torch.from_numpy(logits.copy())).numpy()
        assert np.array_equal(shaped, theirs), changes


def test_tokens_beyond_the_vocabulary_are_of_no_consequence():
    params = SamplingParams(min_tokens=5, logit_bias={2: 1.0})
    rule = ShapingRule.of(params.resolved(), num_prompt_tokens=1, end_ids=frozenset({1, 500}))
    shaped = Shaping(rule, [3], TOY_VOCAB_SIZE).apply(np.zeros((1, TOY_VOCAB_SIZE), np.float32), [()])
    assert shaped.tolist() == [[0.0, -math.inf, 1.0, *[0.0] * 9]]


# ---- grammar --------------------------------------------------------------------------------------------------------


def with_grammar(length: int, new_ids: list[int], **changes: object) -> Shaping:
    params = SamplingParams(grammar=Grammar("regex", "toy"), **changes)
    rule = ShapingRule.of(params.resolved(), num_prompt_tokens=len(PROMPT), end_ids=frozenset({ToyGrammar.END}))
    return Shaping(rule, [*PROMPT, *new_ids], TOY_VOCAB_SIZE, MasksAtOnce(ToyGrammar(length), TimeSpent(10.0)))


def test_the_grammar_rules_out_what_it_does_not_allow_after_each_path():
    grammar = ToyGrammar(4)
    shaped = with_grammar(4, [1, 2]).apply(random_logits(3, 1), [(), (4,), (4, 8)])
    for row, text in zip(np.isfinite(shaped).tolist(), [(1, 2), (1, 2, 4), (1, 2, 4, 8)], strict=True):
        assert row == grammar.follows(text)


def test_the_end_of_the_grammar_comes_before_the_least_length():
    shaped = with_grammar(2, [1], min_tokens=9).apply(random_logits(2, 1), [(), (3,)])
    assert not np.isfinite(shaped[0, ToyGrammar.END]), "too early"
    assert np.flatnonzero(np.isfinite(shaped[1])).tolist() == [ToyGrammar.END], "nothing else may follow"


def test_a_text_that_breaks_the_grammar_is_refused():
    with pytest.raises(TargetError):
        with_grammar(3, [1, 4]).apply(random_logits(1, 1), [()])


def test_what_taking_committed_tokens_costs_counts_with_the_next_mask():
    now = [0.0]

    class Costly(ToyGrammar):
        def advance(self, token_ids):
            now[0] += 0.3
            super().advance(token_ids)

    masks = MasksAtOnce(Costly(9), TimeSpent(0.5, 1.0), lambda: now[0])
    masks.advance([1])
    masks.rows([()])
    masks.advance([2])
    with pytest.raises(GrammarError, match=r"took more than 0\.5 s for one text"):
        masks.rows([()])


def test_one_long_step_is_the_machines_and_two_in_a_row_are_the_grammars():
    spent = TimeSpent(100.0, 0.2)
    for seconds in (0.3, 0.01, 5.0, 0.2):
        spent.add(seconds)
    spent.add(0.25)
    with pytest.raises(GrammarError, match=r"took 0\.30 s for one token, and 0\.2 s are allowed"):
        spent.add(0.3)
