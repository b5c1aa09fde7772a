"""Draft logits to candidates: how likely the target is to choose each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from card.config import SamplingRule
from card.kernels.likeliest import likeliest
from card.tree.filters import filter_logits, kept_tokens, rules_out, with_temperature
from card.tree.logits import FloatArray, Logits, as_array
from card.tree.noise import GumbelNoise, shared_noise
from card.tree.sampling import CHOICE_SHARPNESS


class CandidateScorer:
    """Turns draft logits into the log-probability that the target will choose each token.

    Under coupling the scores include the noise that the target will use at that position, so the first choice is the
    token that the draft model itself would emit there with this seed. It changes which candidates are proposed, never
    which are accepted.
    """

    def __init__(self, rule: SamplingRule, vocab_size: int, *, coupled: bool) -> None:
        self._rule = rule
        self._noise = shared_noise(rule.seed, vocab_size) if coupled and not rule.is_greedy else None

    def top(self, logits: Logits, positions: Sequence[int], count: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the best ``count`` tokens of each row and their log-probabilities, best first; see `likeliest`.

        Args:
            logits: [N, V] floating; row i predicts the token at positions[i].
        """
        scores = as_array(logits)
        if self._rule.is_greedy:
            return likeliest(scores, count, sharpness=CHOICE_SHARPNESS)
        if self._noise is None:
            return likeliest(filter_logits(scores, self._rule), count)
        return likeliest(self._with_noise(scores, positions, self._noise), count, sharpness=CHOICE_SHARPNESS)

    def _with_noise(self, logits: FloatArray, positions: Sequence[int], noise: GumbelNoise) -> FloatArray:
        """Return filtered logits and their noise together: [N, V]."""
        scaled = with_temperature(logits, self._rule)
        if not rules_out(self._rule):
            return scaled + np.stack([noise.near(position) for position in positions])
        sums = np.full_like(scaled, -np.inf)
        for row, position in enumerate(positions):
            tokens = kept_tokens(scaled[row], self._rule)
            sums[row, tokens] = scaled[row, tokens] + noise.near(position, tokens)
        return sums
