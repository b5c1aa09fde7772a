"""Draft logits to candidates: how likely the target is to choose each token."""

from __future__ import annotations

from collections.abc import Sequence

from card.config import SamplingRule
from card.kernels.likeliest import likeliest
from card.tree.logits import Logits, as_array
from card.tree.sampling import CHOICE_SHARPNESS, GumbelNoise, filter_logits


class CandidateScorer:
    """Turns draft logits into the log-probability that the target will choose each token.

    Under coupling the scores include the noise that the target will use at that position, so the first choice is the
    token that the draft model itself would emit there with this seed. It changes which candidates are proposed, never
    which are accepted.
    """

    def __init__(self, rule: SamplingRule, vocab_size: int, *, coupled: bool) -> None:
        self._rule = rule
        self._noise = GumbelNoise(rule.seed, vocab_size) if coupled and not rule.is_greedy else None

    def top(self, logits: Logits, positions: Sequence[int], count: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return the best ``count`` tokens of each row and their log-probabilities, best first; see `likeliest`.

        Args:
            logits: [N, V] floating; row i predicts the token at positions[i].
        """
        scores = as_array(logits)
        if self._rule.is_greedy:
            return likeliest(scores, count, sharpness=CHOICE_SHARPNESS)
        scores = filter_logits(scores, self._rule)
        if self._noise is None:
            return likeliest(scores, count)
        return likeliest(scores + self._noise.rows(positions), count, sharpness=CHOICE_SHARPNESS)
