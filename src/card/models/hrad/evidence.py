"""What H-RAD's outcomes are worth: their chances made true, and weighed against the drafter's own confidence.

Both are fitted on rounds that the network did not learn from. The drafter branches at tokens that it gives less than a
certain probability; whatever a predictor says can only help where it knows more than that probability. So acceptance
is regressed on the log odds of both, and the weight of the foreseen ones is what the regression gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from card.models.hrad.network import CLASSES, Evidence, Layer
from card.models.hrad.rounds import Rounds

_LEAST_GAIN = 2.0  # nats over all tokens, by which chance alone lowers the loss in one case of twenty
_LEAST_SCALE = 0.05
_RIDGE = 1e-4
_MOST_STEPS = 100
_ALMOST = 1e-4  # a token is never certain


def calibrated(layers: Sequence[Layer], scores: Tensor, labels: Tensor) -> list[Layer]:
    """Return layers whose softmax gives true chances: the scores scaled, and moved class by class.

    Training weighs classes and grows too sure; both are undone here. Source: Guo et al. 2017, arXiv:1706.04599; between
    their temperature and vector scaling.

    Args:
        scores: [N, 3] float32 that the layers gave for rounds which they did not learn from.
        labels: [N] int64, the classes of these rounds.
    """
    values = scores.double()

    def loss(parameters: Tensor) -> Tensor:
        return functional.cross_entropy(parameters[0] * values + parameters[1:], labels)

    start = torch.tensor([1.0, *[0.0] * len(CLASSES)], dtype=torch.float64)
    scale, *moves = _minimum(loss, start).tolist()
    scale = max(scale, _LEAST_SCALE)
    *hidden, (weight, bias) = layers
    return [*hidden, (scale * weight, scale * bias + torch.tensor(moves))]


class TokenOutcomes:
    """Every drafted token of some rounds that was compared with the target's, and what was known of it before."""

    def __init__(self, rounds: Rounds, foreseen: Tensor) -> None:
        """Take the rounds and, for each, the foreseen log odds, [N] float."""
        positions = torch.arange(rounds.num_drafted)
        num_accepted = rounds.num_accepted[:, None]
        compared = positions <= num_accepted  # those behind the first rejected one tell nothing
        confidences = rounds.confidences.double().clamp(_ALMOST, 1.0 - _ALMOST)
        self._was_accepted = (positions < num_accepted)[compared].double()
        self._confidence = confidences.logit()[compared]
        self._foreseen = foreseen.double()[:, None].expand(-1, rounds.num_drafted)[compared]

    def __len__(self) -> int:
        return len(self._was_accepted)

    def fit(self, *, uses_foreseen: bool) -> Tensor:
        """Return constant, weight of the drafter's log odds, and weight of the foreseen ones, [3] float64."""
        used = torch.tensor([1.0, 1.0, float(uses_foreseen)], dtype=torch.float64)

        def loss(weights: Tensor) -> Tensor:
            return self._mean_loss(used * weights) + _RIDGE * weights.square().sum()

        return used * _minimum(loss, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))

    def loss(self, weights: Tensor) -> float:
        """Return the mean log loss, in nats a token, of the acceptance that these weights foretell."""
        return float(self._mean_loss(weights))

    def _mean_loss(self, weights: Tensor) -> Tensor:
        odds = weights[0] + weights[1] * self._confidence + weights[2] * self._foreseen
        return functional.binary_cross_entropy_with_logits(odds, self._was_accepted)


def evidence_of(tokens: TokenOutcomes, mean: float) -> Evidence:
    """Return how heavy the foreseen log odds, of this mean, are beside the drafter's; 0 where chance explains it."""
    alone, both = tokens.fit(uses_foreseen=False), tokens.fit(uses_foreseen=True)
    gain = (tokens.loss(alone) - tokens.loss(both)) * len(tokens)
    _, own, foreseen = both.tolist()
    return Evidence(foreseen / own if own > 0 and foreseen > 0 and gain > _LEAST_GAIN else 0.0, mean)


def _minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return where a smooth convex loss is least."""
    parameters = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=_MOST_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(parameters)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return parameters.detach()
