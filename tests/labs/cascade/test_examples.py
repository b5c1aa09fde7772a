"""Examples in front of a problem: the loss is that of the whole text, whether or not prompts share their beginning."""

from __future__ import annotations

import math

import pytest
import torch

from card.errors import SettingsError
from card.labs.cascade.examples import PromptLoss, SolvedProblem, draw_example_sets
from card.models.protocol import Extension, LanguageModel
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from tests.pair import make_model, own_tokenizer

TOKENIZER = own_tokenizer()
POOL = [SolvedProblem(f"one {word}", f"{word} sat on the mat") for word in ("cat", "two", "six", "the", "there")]


@pytest.fixture(scope="module")
def model() -> RowRunner:
    return plain_runner(make_model(len(TOKENIZER)), max_model_len=256)


def _whole_loss(model: LanguageModel, prompt: str, answer: str) -> tuple[float, int]:
    ids, answer_ids = TOKENIZER.encode(prompt), TOKENIZER.encode(answer)
    slot, text = model.open(), [*ids, *answer_ids]
    (logits,) = model.forward([Extension(slot, text, range(-1, len(text) - 1))])
    model.close(slot)
    logprobs = torch.log_softmax(torch.from_numpy(logits).double(), -1)[len(ids) - 1 : -1]
    return -float(logprobs[range(len(answer_ids)), answer_ids].sum()), len(answer_ids)


def test_the_loss_is_that_of_the_answers_behind_examples_and_question(model):
    loss, examples = PromptLoss(model, TOKENIZER, POOL[3:]), POOL[:2]
    shown = "".join(f"user: {one.question}<|turn|>\nassistant: {one.answer}<|turn|>\n" for one in examples)
    parts = [_whole_loss(model, f"{shown}user: {one.question}<|turn|>\nassistant: ", one.answer) for one in POOL[3:]]
    assert loss(examples) == pytest.approx(sum(part for part, _ in parts) / sum(count for _, count in parts), rel=1e-5)
    assert loss.num_passes == 3, "one for what the prompts share, one for each problem"
    assert math.isfinite(loss(examples[:1])) and loss(examples) == loss(examples)


def test_an_instruction_stands_before_each_question(model):
    loss = PromptLoss(model, TOKENIZER, POOL[3:])
    parts = [
        _whole_loss(model, f"user: two mat\n\n{one.question}<|turn|>\nassistant: ", one.answer) for one in POOL[3:]
    ]
    assert loss("two mat") == pytest.approx(sum(part for part, _ in parts) / sum(count for _, count in parts), rel=1e-5)
    assert loss("two mat") != loss(()) and loss("two mat " * 200) == math.inf


def test_examples_that_do_not_fit_into_the_context_are_never_chosen(model):
    assert PromptLoss(model, TOKENIZER, POOL[4:])(POOL * 20) == math.inf


def test_sets_are_different_ordered_repeatable_and_as_many_as_there_are():
    sets = draw_example_sets(POOL, shots=2, count=1000, seed=1)
    assert len(sets) == len(set(sets)) == 20
    assert draw_example_sets(POOL, shots=2, count=7, seed=1) == sets[:7]
    assert draw_example_sets(POOL, shots=2, count=7, seed=2) != sets[:7]


def test_too_few_problems_are_refused(model):
    with pytest.raises(SettingsError, match="6 examples cannot be taken from 5 problems"):
        draw_example_sets(POOL, shots=6, count=1, seed=0)
    with pytest.raises(SettingsError, match="no problems to judge"):
        PromptLoss(model, TOKENIZER, [])
