"""Filters of logits: which tokens a sampling rule leaves."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from card.config import SamplingRule
from card.kernels.likeliest import kth_largest, likeliest
from card.tree.logits import FloatArray, silent_about_no_numbers

# Nats below the best token. Those within mostly have the mass of top-p; they are sorted first: 0.2 ms where the rest
# of 152,000 took 3.
_WITHIN = 8.0

Tokens = NDArray[np.int64]  # in ascending order


def filter_logits(logits: FloatArray, rule: SamplingRule) -> FloatArray:
    """Apply temperature, then top-k, top-p and min-p; what is ruled out becomes minus infinity.

    Args:
        logits: [N, V] float32 or float64, unchanged on return.
        rule: with temperature > 0.
    Returns: [N, V], same dtype; its softmax is the law that tokens are drawn from.
    """
    scaled = with_temperature(logits, rule)
    if not rules_out(rule):
        return scaled
    cut = np.full_like(scaled, -np.inf)
    for row, of_row in enumerate(scaled):
        tokens = kept_tokens(of_row, rule)
        cut[row, tokens] = of_row[tokens]
    return cut


@silent_about_no_numbers
def with_temperature(logits: FloatArray, rule: SamplingRule) -> FloatArray:
    """Return logits over the temperature, in their dtype."""
    return logits / logits.dtype.type(rule.temperature) if rule.temperature != 1.0 else logits


def rules_out(rule: SamplingRule) -> bool:
    """Return whether a rule may rule tokens out."""
    return rule.top_k > 0 or rule.top_p < 1.0 or rule.min_p > 0.0


@silent_about_no_numbers
def kept_tokens(scaled: FloatArray, rule: SamplingRule) -> Tokens:
    """Return the tokens that top-k, top-p and min-p leave, in this order; what is no number stays among them.

    Args:
        scaled: [V] float32 or float64, after the temperature.
    """
    tokens, scores = np.arange(len(scaled)), scaled
    if 0 < rule.top_k < len(scores):
        tokens = np.flatnonzero(~(scores < kth_largest(scores, rule.top_k)))
        scores = scaled[tokens]
    if rule.top_p < 1.0:
        tokens = tokens[_likely(scores, rule.top_p)]
        scores = scaled[tokens]
    if rule.min_p > 0.0:
        tokens = tokens[~(scores < scores.max() + scores.dtype.type(np.log(rule.min_p)))]
    return tokens


def _likely(scores: FloatArray, top_p: float) -> Tokens:
    """Return the places of the likeliest tokens up to a mass of ``top_p``, all if a score is no number.

    Sorting a vocabulary takes a hundred times as long as finding its likely tokens, so those near the best one come
    first: mostly they have enough. Tokens with less than (1 - top_p) / N have less than 1 - top_p together, so none of
    them belongs to the rest.
    """
    [[best]], [[logprob]] = likeliest(scores[None], 1)
    if not math.isfinite(logprob):
        return np.arange(len(scores))
    most = float(scores[best])
    least = most - logprob + math.log(0.5 * (1.0 - top_p) / len(scores))  # half of it, for rounding
    for floor in (max(most - _WITHIN, least), least):
        places = np.flatnonzero(scores >= floor)
        probs = np.exp(scores[places] - scores.dtype.type(most - logprob))
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order], dtype=np.float64) - probs[order]
        count = int(np.searchsorted(before, top_p))
        if count < len(places):
            break
    return np.sort(places[order[: max(1, count)]])
