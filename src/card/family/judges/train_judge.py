"""Train AutoJudge or a reward on mined mismatches: a logistic regression whose ridge is chosen by cross-validation.

Source: arXiv:2504.20039 (regression on hidden states, chosen by the area under the ROC curve, threshold by recall).
Ours: five-fold cross-validation over prompts instead of one split, as a few hundred mismatches split badly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from card.backends.transformers.arrays import as_array
from card.errors import PromptError
from card.family.judges.auto import AutoJudge, PairFacts
from card.family.judges.mining import Mismatches
from card.family.learning.regression import area_range, cross_validate, fit_ridge

LEAST_OF_A_KIND = 5  # important and unimportant mismatches
RECALL = 0.9  # share of the important mismatches that the default knob rejects


@dataclass(frozen=True, slots=True)
class TrainedJudge:
    """A judge, and its quality on mismatches of held-out prompts."""

    judge: AutoJudge
    num_mismatches: int
    num_important: int
    area: float  # under the ROC curve: 0.5 is chance, 1 is perfect
    area_range: tuple[float, float]  # its 95 % interval over prompts
    kept_share: float  # of the unimportant mismatches that the default knob tolerates
    ridge: float

    def figures(self) -> dict[str, str]:
        """Return these figures by name, for a file's metadata."""
        return {
            "num_mismatches": str(self.num_mismatches),
            "num_important": str(self.num_important),
            "area_under_roc": f"{self.area:.4f}",
            "area_range": "{:.4f} {:.4f}".format(*self.area_range),
            "kept_share": f"{self.kept_share:.4f}",
            "ridge": f"{self.ridge:g}",
        }


def train_judge(mined: Mismatches, pair: PairFacts, kind: type[AutoJudge] = AutoJudge, **own: Any) -> TrainedJudge:
    """Return the judge trained on these mismatches.

    Args:
        own: what this kind of judge is told besides.
    Raises: PromptError if there are too few mismatches that are important, or not.
    """
    labels = mined.is_important
    num_important = int(labels.sum())
    if not LEAST_OF_A_KIND <= num_important <= len(labels) - LEAST_OF_A_KIND:
        raise PromptError(
            f"{num_important} of {len(labels)} mismatches changed the answer, and a {kind.FILE.kind} needs"
            f" {LEAST_OF_A_KIND} that do and as many that do not; give more prompts"
        )
    states = mined.features.double()
    checked = cross_validate(states, labels, mined.prompt_idx)
    scores = checked.scores
    usual = float(scores[labels].quantile(1.0 - RECALL).sigmoid())
    weights, bias = fit_ridge(states, labels, checked.ridge)
    return TrainedJudge(
        judge=kind(as_array(weights.float()), bias, usual=usual, pair=pair, knob=None, **own),
        num_mismatches=len(labels),
        num_important=num_important,
        area=checked.area,
        area_range=area_range(scores, labels, mined.prompt_idx),
        kept_share=float((scores[~labels].sigmoid() < usual).double().mean()),
        ridge=checked.ridge,
    )
