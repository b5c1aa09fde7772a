"""Logistic regression on a few hundred examples, with a ridge chosen by cross-validation over groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NUM_FOLDS = 5
_RIDGES = tuple(10.0**power for power in range(-2, 5))  # nats for a squared weight of 1, over all examples
_SMALLEST_STD = 1e-3  # nearly constant inputs are not amplified
_NEWTON_STEPS = 25
_NUM_DRAWS = 1000  # of the bootstrap, as usual


@dataclass(frozen=True, slots=True)
class CrossValidated:
    """The ridge that is best on held-out data."""

    ridge: float
    area: float  # under the ROC curve
    scores: Tensor  # [N] float64, log odds, each from a regression without its group


def cross_validate(states: Tensor, labels: Tensor, group_idx: Tensor) -> CrossValidated:
    """Return the result of five-fold cross-validation over groups.

    Args:
        states: [N, D] float64.
        labels: [N] bool; both kinds occur.
        group_idx: [N] int64; examples of one group stay together.
    """
    folds = [group_idx % _NUM_FOLDS == fold for fold in range(_NUM_FOLDS)]
    tried = []
    for ridge in _RIDGES:
        scores = torch.zeros(len(labels), dtype=torch.float64)
        for held in folds:
            if held.any() and 0 < int(labels[~held].sum()) < int((~held).sum()):
                weights, bias = fit_ridge(states[~held], labels[~held], ridge)
                scores[held] = states[held] @ weights + bias
        tried.append(CrossValidated(ridge, area_under_roc(scores, labels), scores))
    return max(tried, key=lambda one: one.area)


def fit_ridge(states: Tensor, labels: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Return weights [D] and bias of a logistic regression with a ridge on standardised inputs, by Newton's method.

    Args:
        states: [N, D] float64.
        labels: [N] bool; both kinds occur.
    """
    mean, std = states.mean(0), states.std(0, correction=0).clamp_min(_SMALLEST_STD)
    inputs = (states - mean) / std
    # Fewer examples than inputs: with a ridge, weights stay in the space that the examples span.
    basis = torch.linalg.qr(inputs.T).Q if len(states) < states.shape[1] else None
    inputs = inputs if basis is None else inputs @ basis
    inputs = torch.cat((inputs, torch.ones(len(states), 1, dtype=states.dtype)), 1)
    penalty = torch.full((inputs.shape[1],), ridge, dtype=states.dtype)
    penalty[-1] = 1e-6  # the bias is free
    solution = torch.zeros(inputs.shape[1], dtype=states.dtype)
    for _ in range(_NEWTON_STEPS):
        chances = (inputs @ solution).sigmoid()
        slope = inputs.T @ (chances - labels.double()) + penalty * solution
        curvature = (inputs.T * (chances * (1 - chances)).clamp_min(1e-9)) @ inputs + penalty.diag()
        step = torch.linalg.solve(curvature, slope)
        solution = solution - step
        if float(step.abs().max()) < 1e-8:
            break
    weights = (solution[:-1] if basis is None else basis @ solution[:-1]) / std
    return weights, float(solution[-1] - weights @ mean)


def area_under_roc(scores: Tensor, labels: Tensor) -> float:
    """Return the chance that a positive example has a higher score than a negative one; ties count half."""
    negative = scores[~labels].sort().values
    below, at_most = (torch.searchsorted(negative, scores[labels], right=right) for right in (False, True))
    return float((below + at_most).double().mean()) / (2 * len(negative))


def area_range(scores: Tensor, labels: Tensor, group_idx: Tensor) -> tuple[float, float]:
    """Return a 95 % interval of `area_under_roc`, by drawing groups anew with the seed 0.

    Args:
        scores: [N].
        labels: [N] bool; both kinds occur.
        group_idx: [N] int64; examples of one group are drawn together.
    """
    groups = [(group_idx == one).nonzero()[:, 0] for one in set(group_idx.tolist())]
    random, areas = torch.Generator().manual_seed(0), []
    for _ in range(_NUM_DRAWS):
        drawn = torch.cat([groups[i] for i in torch.randint(len(groups), (len(groups),), generator=random).tolist()])
        if 0 < int(labels[drawn].sum()) < len(drawn):
            areas.append(area_under_roc(scores[drawn], labels[drawn]))
    low, high = torch.tensor(areas, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)
