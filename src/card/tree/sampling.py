"""Logits to tokens: one function for every method, plain decoding included.

With temperature > 0 a token is chosen by the Gumbel-max rule, with noise that is a pure function of (seed, position).
So the same seed gives the same text, whatever was speculated and whatever arrived when; and a drafter that knows the
seed can rank its candidates with the very noise that the target will use (coupled noise).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from card.config import SamplingRule
from card.errors import ModelError
from card.tree.logits import (
    DeviceLogits,
    FloatArray,
    Logits,
    as_array,
    log_softmax,
    silent_about_no_numbers,
    softmax,
    top,
)

T = TypeVar("T")

_NEGATIVE_INFINITY = float("-inf")
_NOISE_BYTES_KEPT = 1 << 24  # noise that a request remembers: 512 positions of 4,096 tokens, 13 of 152,000
# Noise above this bound is rare (one token of 149), so a choice looks at the tokens that have it and at those that are
# likely enough to win without it. Any bound gives the same choice; this one leaves few tokens of either kind.
_RARE_NOISE = 5.0
_RARE_BITS = np.uint64(math.ceil(math.exp(-math.exp(-_RARE_NOISE)) * 2.0**64))
# Where the target's choice is a function of its logits (greedy, or with known noise), it is more certain than the
# draft's own probability says: scores are sharpened by this before they count as log-probabilities. docs/decisions.md
CHOICE_SHARPNESS = 1.5


class GumbelNoise:
    """Standard Gumbel noise for each (position, token) of one seed, from the counter-based generator Philox.

    The noise depends on nothing but (seed, position, token id): Philox 4x64 keyed by the seed, with the position in
    the upper half of its counter. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._bits: dict[int, NDArray[np.uint64]] = {}
        self._rows: dict[int, NDArray[np.float32]] = {}

    def row(self, position: int) -> NDArray[np.float32]:
        """Return the noise of one position: [V]."""
        found = self._rows.get(position)
        if found is None:
            found = _noise_of(self._draw(position))
            _remember(self._rows, position, found, found.nbytes)
        return found

    def rows(self, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return [N, V] float32 noise, one row per position."""
        return np.stack([self.row(position) for position in positions])

    def likeliest(self, scores: NDArray[np.floating[Any]], position: int) -> tuple[int, float]:
        """Return the token with the largest sum of score and noise, the first of equal ones, and that sum.

        Only tokens that can win are looked at: a vocabulary of 152,000 has about a thousand of them.

        Args:
            scores: [V]. If the largest is no finite number, the sum is none either.
        """
        bits = self._bits.get(position)
        if bits is None:
            bits = self._draw(position)
            _remember(self._bits, position, bits, bits.nbytes)
        best = int(scores.argmax())  # a NaN counts as largest
        reached = float(scores[best]) + float(_noise_of(bits[best : best + 1])[0])
        if not math.isfinite(reached):
            return best, reached
        is_near = scores > reached - _RARE_NOISE - 1.0  # one more than the bound, for rounding
        is_near |= bits >= _RARE_BITS
        tokens = np.flatnonzero(is_near)
        sums = scores[tokens] + _noise_of(bits[tokens])
        winner = int(sums.argmax())
        return int(tokens[winner]), float(sums[winner])

    def _draw(self, position: int) -> NDArray[np.uint64]:
        """Return the random bits of one position: [V]."""
        bits: NDArray[np.uint64] = np.random.Philox(key=self._seed, counter=[0, 0, position, 0]).random_raw(
            self._vocab_size
        )
        return bits


def _noise_of(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return standard Gumbel noise from random bits; each value depends on its own bits alone, and grows with them."""
    noise = (bits >> np.uint64(12)).astype(np.float64)  # worked on in place: new memory takes as long as logarithms
    noise += 0.5
    noise *= 2.0**-52  # uniform inside (0, 1), exactly
    for _ in range(2):
        np.negative(np.log(noise, out=noise), out=noise)
    return noise.astype(np.float32)


def _remember(kept: dict[int, T], position: int, value: T, num_bytes: int) -> None:
    """Keep a value of ``num_bytes``, like all others; the oldest goes if there are too many."""
    if len(kept) >= max(1, _NOISE_BYTES_KEPT // max(num_bytes, 1)):
        kept.pop(next(iter(kept)))
    kept[position] = value


@silent_about_no_numbers
def filter_logits(logits: FloatArray, rule: SamplingRule) -> FloatArray:
    """Apply temperature, then top-k, top-p and min-p; what is ruled out becomes minus infinity.

    Args:
        logits: [N, V] float32 or float64, unchanged on return.
        rule: with temperature > 0.
    Returns: [N, V], same dtype; its softmax is the law that tokens are drawn from.
    """
    scaled = logits / logits.dtype.type(rule.temperature) if rule.temperature != 1.0 else logits
    if 0 < rule.top_k < scaled.shape[-1]:
        kth = np.partition(scaled, -rule.top_k, axis=-1)[:, -rule.top_k, None]
        scaled = np.where(scaled < kth, scaled.dtype.type(_NEGATIVE_INFINITY), scaled)
    if rule.top_p < 1.0:
        scaled = keep_likely(scaled, rule.top_p)
    if rule.min_p > 0.0:
        floor = scaled.max(-1, keepdims=True) + scaled.dtype.type(np.log(rule.min_p))
        scaled = np.where(scaled < floor, scaled.dtype.type(_NEGATIVE_INFINITY), scaled)
    return scaled


def keep_likely(scaled: FloatArray, top_p: float) -> FloatArray:
    """Rule out the tokens after likelier ones of mass ``top_p``.

    Sorting a vocabulary takes a hundred times as long as finding its likely tokens. All tokens with less than
    (1 - top_p) / V have less than 1 - top_p together, so none of them belongs to the rest.
    """
    probs = softmax(scaled)
    least = 0.5 * (1.0 - top_p) / probs.shape[-1]  # half of it, for rounding
    cut = np.full_like(scaled, _NEGATIVE_INFINITY)
    for row, of_row in enumerate(probs):
        tokens = np.flatnonzero(of_row >= least)
        tokens = tokens[np.argsort(-of_row[tokens], kind="stable")]
        before = np.cumsum(of_row[tokens], dtype=np.float64) - of_row[tokens]
        kept = tokens[: max(1, int(np.searchsorted(before, top_p)))]
        cut[row, kept] = scaled[row, kept]
    return cut


class Sampler:
    """Chooses the tokens of one request; the only place where the target's logits become tokens."""

    def __init__(self, rule: SamplingRule, vocab_size: int) -> None:
        self.rule = rule
        self._noise = GumbelNoise(rule.seed, vocab_size)

    def choose(self, logits: Logits, positions: Sequence[int]) -> list[int]:
        """Return the token that follows each row.

        Args:
            logits: [N, V]; row i predicts the token at positions[i].
            positions: N absolute positions, counted from the start of the prompt.
        """
        if self.rule.is_greedy:
            return self._likeliest(logits)
        array = as_array(logits)
        rows = (filter_logits(array[row : row + 1], self.rule)[0] for row in range(len(array)))  # stays in the cache
        pairs = [self._noise.likeliest(row, position) for row, position in zip(rows, positions, strict=True)]
        _check_scores([score for _, score in pairs])
        return [token for token, _ in pairs]

    @staticmethod
    def _likeliest(logits: Logits) -> list[int]:
        """Return the index of each row's largest score, the first of equal ones.

        Raises: ModelError if that score is no number or rules every token out.
        """
        if isinstance(logits, np.ndarray) or not isinstance(logits, DeviceLogits):
            array = as_array(logits)
            chosen: list[int] = array.argmax(-1).tolist()  # a NaN counts as largest
            values = [array.item(row, best) for row, best in enumerate(chosen)]
        else:
            chosen, values = logits.likeliest()
        _check_scores(values)
        return chosen


def _check_scores(values: Sequence[float]) -> None:
    """Refuse scores of chosen tokens that are no numbers, or that rule every token out, with ModelError."""
    if not all(map(math.isfinite, values)):
        raise ModelError(
            "the target's logits hold NaN or infinity, or rule every token out; check the model, its dtype and any "
            "logits processor"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log-probabilities of a token: natural logarithms, before temperature, penalties and masks."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, its log-probability) of the likeliest ones, best first


def token_logprobs(logits: Logits, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return how likely each token was under raw logits.

    Args:
        logits: [N, V]; row i predicts token_ids[i].
        num_top: how many of the likeliest tokens are listed, all V if there are fewer.
    """
    logprobs = log_softmax(as_array(logits))
    chosen = [logprobs.item(row, token_id) for row, token_id in enumerate(token_ids)]
    tokens, values = top(logprobs, num_top)
    tops = [tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
    return tuple([TokenLogprobs(*of_one) for of_one in zip(token_ids, chosen, tops, strict=True)])
