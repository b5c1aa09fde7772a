"""Sampling rules and logits to try them with, and the law that a rule stands for in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from card.config import SamplingRule
from card.kernels.number_types import Floats

GREEDY = SamplingRule(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
PLAIN = replace(GREEDY, temperature=1.0)
seeds = st.integers(0, 2**63 - 1)
rules = st.builds(
    SamplingRule,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 99]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    seed=seeds,
)


@st.composite
def batches(draw: st.DrawFn) -> Floats:
    """Return [N, V] float32 with many ties, as bfloat16 has, and V from 1 to 40: vectorised loops have tails."""
    shape = (draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 5, 8, 17, 40])))
    return (np.random.default_rng(draw(st.integers(0, 10**6))).integers(-8, 9, shape) / 2).astype(np.float32)


def slow_law(logits: list[float], rule: SamplingRule) -> list[float]:
    """Return the law that a rule stands for, in plain Python, for distinct logits.

    Raises: ArithmeticError if a cut is so close that rounding decides it.
    """
    weights = {token: math.exp((logit - max(logits)) / rule.temperature) for token, logit in enumerate(logits)}
    ordered = sorted(weights, key=lambda token: -weights[token])
    if rule.top_k:
        ordered = ordered[: rule.top_k]
    total = sum(weights[token] for token in ordered)
    kept, before = [], 0.0
    for token in ordered:
        if rule.top_p < 1.0 and abs(before / total - rule.top_p) < 1e-5:
            raise ArithmeticError("top_p")
        if rule.top_p == 1.0 or before / total < rule.top_p:
            kept.append(token)
        before += weights[token]
    if any(abs(weights[token] / weights[ordered[0]] - rule.min_p) < 1e-5 for token in kept if rule.min_p):
        raise ArithmeticError("min_p")
    kept = [token for token in kept if weights[token] >= rule.min_p * weights[ordered[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def clear_law(logits: list[float], rule: SamplingRule) -> list[float]:
    """Return `slow_law`, or leave the example out."""
    try:
        return slow_law(logits, rule)
    except ArithmeticError:
        reject()
