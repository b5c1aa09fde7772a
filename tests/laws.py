"""The law of sampled text: every continuation of a tiny model with its probability, and how far counts are off it."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from transformers import LlamaForCausalLM

from tests.tiny import NO_ENDS, tiny_llama

VOCAB_SIZE, NUM_NEW, NUM_TEXTS = 5, 4, 6000
TEMPERATURE = 0.8


def tiny_model(noise: float) -> LlamaForCausalLM:
    return tiny_llama(
        VOCAB_SIZE,
        seed=3,
        noise=noise,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        **NO_ENDS,
    )


@torch.no_grad()
def law_of(model: LlamaForCausalLM, prompt_ids: list[int]) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of NUM_NEW tokens."""
    law = {(): 1.0}
    for _ in range(NUM_NEW):
        texts = list(law)
        logits = model(torch.tensor([[*prompt_ids, *text] for text in texts])).logits[:, -1]
        probs = (logits.double() / TEMPERATURE).softmax(-1).tolist()
        pairs = itertools.product(zip(texts, probs, strict=True), range(VOCAB_SIZE))
        law = {(*text, token): law[text] * row[token] for (text, row), token in pairs}
    return law


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Return by how many standard deviations counts are off a law; rare texts count as one."""
    expected = {text: NUM_TEXTS * prob for text, prob in law.items()}
    common = [text for text, number in expected.items() if number >= 8.0]
    rest = NUM_TEXTS - sum(expected[text] for text in common)
    num_rest = NUM_TEXTS - sum(counts[text] for text in common)
    statistic = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in common)
    statistic += (num_rest - rest) ** 2 / rest if rest > 1.0 else 0.0
    freedom = len(common) - (rest <= 1.0)
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def mixed_law(law: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Return another law, near enough that a test must be able to tell it from the right one."""
    return {text: (prob + 1.15 * law[text[::-1]]) / 2.15 for text, prob in law.items()}
