"""Logits to tokens: one function for every method, plain decoding included.

With temperature > 0 a token is chosen by the Gumbel-max rule, with noise that is a pure function of (seed, position).
So the same seed gives the same text, whatever was speculated and whatever arrived when; and a drafter that knows the
seed can rank its candidates with the very noise that the target will use (coupled noise).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from card.config import SamplingRule
from card.errors import ModelError
from card.tree.filters import kept_tokens, rules_out, with_temperature
from card.tree.logits import DeviceLogits, FloatArray, Logits, as_array, log_softmax, top
from card.tree.noise import shared_noise

# Where the target's choice is a function of its logits (greedy, or with known noise), it is more certain than the
# draft's own probability says: scores are sharpened by this before they count as log-probabilities. docs/decisions.md
CHOICE_SHARPNESS = 1.5


class Sampler:
    """Chooses the tokens of one request; the only place where the target's logits become tokens."""

    def __init__(self, rule: SamplingRule, vocab_size: int) -> None:
        self.rule = rule
        self._noise = shared_noise(rule.seed, vocab_size)

    def choose(self, logits: Logits, positions: Sequence[int]) -> list[int]:
        """Return the token that follows each row.

        Args:
            logits: [N, V]; row i predicts the token at positions[i].
            positions: N absolute positions, counted from the start of the prompt.
        """
        if self.rule.is_greedy:
            return self._likeliest(logits)
        pairs = [self._drawn(row, position) for row, position in zip(as_array(logits), positions, strict=True)]
        _check_scores([score for _, score in pairs])
        return [token for token, _ in pairs]

    def _drawn(self, logits: FloatArray, position: int) -> tuple[int, float]:
        """Return the token that follows a row, and its score with noise: [V]."""
        scaled = with_temperature(logits, self.rule)
        if not rules_out(self.rule):
            return self._noise.likeliest(scaled, position)
        tokens = kept_tokens(scaled, self.rule)
        place, score = self._noise.likeliest(scaled[tokens], position, tokens)
        return int(tokens[place]), score

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
