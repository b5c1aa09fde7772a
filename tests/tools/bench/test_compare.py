"""Where two texts part, the target's own logits decide whether rounding may have done it."""

from __future__ import annotations

import pytest
import torch

from card.config import SamplingParams
from card.tools.bench.compare import Gap, TextJudge
from card.tree.noise import GumbelNoise
from tests.pair import make_model

GREEDY = SamplingParams(temperature=0.0, seed=0).resolved()
PROMPT = [5, 20, 30]


def test_a_wrong_token_is_named_with_its_logit_gap() -> None:
    target = make_model(40)
    judge = TextJudge(target, GREEDY)
    with torch.inference_mode():
        logits = target(input_ids=torch.tensor([[*PROMPT, 7]])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    gap = judge.gap(PROMPT, (7, worst, 9), (7, best, 8), 1)
    assert gap.logits == pytest.approx(float(logits.max() - logits.min()), rel=1e-5) and not gap.is_near_tie


def test_a_text_that_ends_early_is_no_near_tie() -> None:
    judge = TextJudge(make_model(40), GREEDY)
    assert judge.gap(PROMPT, (7,), (7, 8), 1) == judge.gap(PROMPT, (7, 8), (7,), 1) == Gap(None, is_near_tie=False)


def test_equal_logits_are_a_near_tie_in_half_precision_alone() -> None:
    for dtype, is_near_tie in ((torch.float32, False), (torch.bfloat16, True)):
        target = make_model(40).to(dtype)
        with torch.no_grad():
            target.lm_head.weight[11] = target.lm_head.weight[12]
        gap = TextJudge(target, GREEDY).gap(PROMPT, (11,), (12,), 0)
        assert gap == Gap(0.0, is_near_tie=is_near_tie)


def test_when_text_is_sampled_the_noise_is_part_of_the_gap() -> None:
    target, params = make_model(40), SamplingParams(temperature=0.7, seed=3).resolved()
    with torch.inference_mode():
        logits = target(input_ids=torch.tensor([PROMPT])).logits[0, -1].double()
    noisy = logits + 0.7 * torch.from_numpy(GumbelNoise(3, 40).row(len(PROMPT))).double()
    gap = TextJudge(target, params).gap(PROMPT, (11,), (12,), 0)
    assert gap.logits == pytest.approx(abs(float(noisy[11] - noisy[12])), rel=1e-5)


def test_nothing_is_a_near_tie_where_orders_of_summation_do_not_differ() -> None:
    target = make_model(40).to(torch.bfloat16)
    with torch.no_grad():
        target.lm_head.weight[11] = target.lm_head.weight[12]
    assert TextJudge(target, GREEDY, rounds=False).gap(PROMPT, (11,), (12,), 0) == Gap(0.0, is_near_tie=False)
