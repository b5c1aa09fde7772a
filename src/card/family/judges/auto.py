"""AutoJudge: a logistic regression on the target's hidden states predicts which mismatches change the answer.

A mismatch is important if the target ends with another answer when it continues from the draft's token. A mismatch
that looks unimportant is tolerated. Source: Garipov et al. 2025, arXiv:2504.20039. Ours: the input is only the target's
last hidden state at the draft's token, which a verifying pass computes anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from card.family.judges.judge import Mismatch
from card.kernels.number_types import Array, Floats
from card.models.features import FINAL, FeatureWish
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import embedding_probe, probe_difference, probe_width
from card.models.runner import RowRunner

AUTO_WISH = FeatureWish((FINAL,), "logits")


@dataclass(frozen=True, slots=True)
class PairFacts:
    """The pair that a judge was made for."""

    draft: str  # name of the draft model, without its folders
    probe: Floats  # [8 * D] float32, see `embedding_probe`

    @classmethod
    def of(cls, target: RowRunner, draft: str) -> PairFacts:
        """Return the facts of a target and the draft model of this name."""
        return cls(Path(draft).name, embedding_probe(target))

    @property
    def width(self) -> int:
        """D, the width of the target's states."""
        return probe_width(self.probe)

    def difference(self, other: PairFacts) -> str:
        """Return in words how the other pair differs; empty if it does not."""
        if difference := probe_difference(self.probe, other.probe):
            return difference
        if other.draft and self.draft != other.draft:
            return f"its draft model is {self.draft}, this one {other.draft}"
        return ""


class AutoJudge:
    """Tolerate a mismatch whose probability of being important is below the knob; with 0 no mismatch is."""

    FILE: ClassVar = TrainedFile("judge", "card-judge-1", "card train judge")

    def __init__(self, weights: Floats, bias: float, *, usual: float, pair: PairFacts, knob: float | None) -> None:
        """Make the judge from its regression.

        Args:
            weights: [D] float32, for hidden states that are not normalised.
            usual: default knob: it rejects as many important mismatches as the training was asked for.
            knob: in [0, 1]; None: ``usual``.
        """
        self.weights, self.bias, self.usual, self.pair = weights, bias, usual, pair
        self.knob = usual if knob is None else knob

    @classmethod
    def load(cls, path: str | Path, knob: float | None = None) -> Self:
        """Read a judge that `save` wrote. Raises: ModelError if there is none."""
        return cls.FILE.load(path, lambda facts, arrays: cls._of(facts, arrays, knob))

    @classmethod
    def _of(cls, facts: Mapping[str, str], arrays: dict[str, Array], knob: float | None) -> Self:
        """Make a judge from the contents of a file."""
        pair = PairFacts(facts["draft"], arrays["probe"].astype(np.float32))
        weights = arrays["weights"].astype(np.float32)
        if weights.shape != (pair.width,):
            raise ValueError(f"it has weights of shape {list(weights.shape)} for states of width {pair.width}")
        bias, usual = float(facts["bias"]), float(facts["usual"])
        if not (math.isfinite(bias) and 0.0 <= usual <= 1.0):
            raise ValueError(f"its usual knob is {usual:g}, its bias {bias:g}; a knob is from 0 to 1, a bias finite")
        return cls(weights, bias, usual=usual, pair=pair, knob=knob)

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the judge as safetensors; ``figures`` are its quality, by name. Raises: ModelError if that fails."""
        facts = {"draft": self.pair.draft, "bias": repr(self.bias), "usual": repr(self.usual)}
        self.FILE.save(path, self._arrays(), {**(figures or {}), **facts})

    def _arrays(self) -> dict[str, Array]:
        return {"weights": self.weights, "probe": self.pair.probe}

    def check_pair(self, target: RowRunner, draft: str) -> None:
        """Refuse a pair that the judge was not trained for; ``draft`` is empty if unknown. Raises: ModelError."""
        self.FILE.check_made_for("pair", f"the {self.FILE.kind}", self.pair.difference(PairFacts.of(target, draft)))

    def tolerates(self, mismatch: Mismatch) -> bool:
        """Return whether the candidate is accepted."""
        assert mismatch.seen.features is not None, "the judge's features were requested"
        return self.importance(mismatch.seen.features[mismatch.candidate + 1]) < self.knob

    def importance(self, features_row: Floats) -> float:
        """Return the probability that a mismatch is important, from the state [D] at the draft's token."""
        score = float(self.weights @ features_row) + self.bias
        return 0.5 + 0.5 * math.tanh(0.5 * score)  # the logistic function, which does not overflow
