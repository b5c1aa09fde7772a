"""Train AutoJudge on mined mismatches: a logistic regression whose ridge is chosen by cross-validation.

Source: arXiv:2504.20039 (regression on hidden states, chosen by the area under the ROC curve, threshold by recall).
Ours: five-fold cross-validation over prompts in place of one split, as a few hundred mismatches give poor splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from card.errors import PromptError
from card.family.judges.auto import AutoJudge, PairFacts
from card.family.judges.mining import Mismatches

LEAST_OF_A_KIND = 5  # important and unimportant mismatches
RECALL = 0.9  # of the important mismatches, that the usual knob keeps out
_NUM_FOLDS = 5
_RIDGES = tuple(10.0**power for power in range(-2, 5))  # nats for a squared weight of 1, over all examples
_SMALLEST_STD = 1e-3  # a state that hardly varies is not blown up
_NEWTON_STEPS = 25


@dataclass(frozen=True, slots=True)
class TrainedJudge:
    """A judge, and how it does on mismatches of prompts that it had not learnt from."""

    judge: AutoJudge
    num_mismatches: int
    num_important: int
    area: float  # under the ROC curve: 0.5 is chance, 1 tells all apart
    kept_share: float  # of the unimportant mismatches, that the usual knob tolerates
    ridge: float

    def figures(self) -> dict[str, str]:
        """Return these figures by name, for a file's metadata."""
        return {
            "num_mismatches": str(self.num_mismatches),
            "num_important": str(self.num_important),
            "area_under_roc": f"{self.area:.4f}",
            "kept_share": f"{self.kept_share:.4f}",
            "ridge": f"{self.ridge:g}",
        }


def train_judge(mined: Mismatches, pair: PairFacts) -> TrainedJudge:
    """Return the judge that the mismatches teach. Raises: PromptError if too few of them are of one kind."""
    labels = mined.is_important
    num_important = int(labels.sum())
    if not LEAST_OF_A_KIND <= num_important <= len(labels) - LEAST_OF_A_KIND:
        raise PromptError(
            f"{num_important} of {len(labels)} mismatches changed the answer, and a judge needs {LEAST_OF_A_KIND} that"
            " do and as many that do not; give more prompts"
        )
    states = mined.features.double()
    checked = cross_validate(states, labels, mined.prompt_idx)
    scores = checked.scores
    usual = float(scores[labels].quantile(1.0 - RECALL).sigmoid())
    weights, bias = fit(states, labels, checked.ridge)
    return TrainedJudge(
        judge=AutoJudge(weights.float(), bias, usual=usual, pair=pair, knob=None),
        num_mismatches=len(labels),
        num_important=num_important,
        area=checked.area,
        kept_share=float((scores[~labels].sigmoid() < usual).double().mean()),
        ridge=checked.ridge,
    )


@dataclass(frozen=True, slots=True)
class CrossValidated:
    """The ridge that tells best apart what a regression had not learnt from."""

    ridge: float
    area: float  # under the ROC curve
    scores: Tensor  # [N] float64, log odds, each by a regression that had not seen its group


def cross_validate(states: Tensor, labels: Tensor, group_idx: Tensor) -> CrossValidated:
    """Return what five-fold cross-validation over groups says.

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
                weights, bias = fit(states[~held], labels[~held], ridge)
                scores[held] = states[held] @ weights + bias
        tried.append(CrossValidated(ridge, area_under_roc(scores, labels), scores))
    return max(tried, key=lambda one: one.area)


def fit(states: Tensor, labels: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Return weights [D] and bias of a logistic regression with a ridge on standardised inputs, by Newton's method.

    Args:
        states: [N, D] float64.
        labels: [N] bool; both kinds occur.
    """
    mean, std = states.mean(0), states.std(0, correction=0).clamp_min(_SMALLEST_STD)
    inputs = (states - mean) / std
    # Fewer examples than inputs: the ridge lets no weight leave the space that the examples span.
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
    """Return the chance that an important mismatch has a higher score than an unimportant one; ties count half."""
    differences = scores[labels][:, None] - scores[~labels][None, :]
    return float(((differences > 0).double() + 0.5 * (differences == 0).double()).mean())
