"""A trained router: a logistic regression predicts how likely the target's step would be better than the draft model's.

Its input is known before the target writes: the question, the answer so far with the writer of each step, and the step.
Source: Arbitrage, arXiv:2512.05033, whose router is a language model of 1.5 B parameters. Ours has a dozen features of
these texts and of the draft model's entropies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from card.config.fields import require
from card.kernels.number_types import Array, Floats
from card.labs.steps.rewards import equations_hold
from card.labs.steps.routers import Step
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import embedding_probe, probe_difference
from card.models.runner import RowRunner
from card.theirs.transformers.arrays import as_array, as_tensor

_FILE = TrainedFile("router", "card-router-1", "card train router")
_PROBES = "target_probe", "draft_probe"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

FEATURES = (
    "entropy of the first token",
    "mean entropy",
    "largest entropy",
    "log of the step's tokens",
    "log of the steps before it",
    "share of them by the target",
    "the last one was the target's",
    "share of right equations",
    "it has an equation",
    "share of its numbers that came before",
    "it has the answer's mark",
)


def describe(step: Step) -> Tensor:
    """Return the features of a step, [F] float64 in the order of `FEATURES`."""
    entropies = step.entropies or (step.first_entropy,)
    numbers, known = _NUMBER.findall(step.text), set(_NUMBER.findall(step.question + " " + step.before))
    return torch.tensor(
        [
            step.first_entropy,
            sum(entropies) / len(entropies),
            max(entropies),
            math.log1p(len(entropies)),
            math.log1p(len(step.writers)),
            step.writers.count("target") / max(1, len(step.writers)),
            step.writers[-1:] == ("target",),
            equations_hold("", step.text),
            "=" in step.text,
            sum(number in known for number in numbers) / max(1, len(numbers)),
            "####" in step.text,
        ],
        dtype=torch.float64,
    )


@dataclass(frozen=True, slots=True)
class RouterPair:
    """The pair that a router was made for, known by `embedding_probe` of both models."""

    target: Floats
    draft: Floats

    @classmethod
    def of(cls, target: RowRunner, draft: RowRunner) -> RouterPair:
        """Return the facts of two models."""
        return cls(embedding_probe(target), embedding_probe(draft))


def _parts(facts: Mapping[str, str], arrays: dict[str, Array]) -> tuple[Tensor, float, float, RouterPair]:
    """Return the contents of a file: weights, bias, the default knob and the pair."""
    if arrays["weights"].shape != (len(FEATURES),):
        raise ValueError(f"{len(FEATURES)} weights were expected")
    pair = RouterPair(*(arrays[name] for name in _PROBES))
    return as_tensor(arrays["weights"]).double(), float(facts["bias"]), float(facts["usual"]), pair


class TrainedRouter:
    """Keep a step if the predicted chance that the target's is better is below the knob; 0 keeps none, 1 all."""

    needs_target = False

    def __init__(self, weights: Tensor, bias: float, *, usual: float, pair: RouterPair, knob: float | None) -> None:
        """Make the router from its regression.

        Args:
            weights: [F] float64, for features that are not normalised.
            usual: default knob: as many steps go to the target as were better in training.
            knob: in [0, 1]; None: ``usual``.
        Raises: SettingsError for a knob out of range.
        """
        self.weights, self.bias, self.usual, self.pair = weights, bias, usual, pair
        allowed = f"from 0 to 1; 0 is exact, {usual:.3g} is usual"
        require(knob is None or 0.0 <= knob <= 1.0, "the knob of a router", allowed, knob)
        self.knob = usual if knob is None else knob

    @classmethod
    def load(cls, path: str | Path, knob: float | None = None) -> TrainedRouter:
        """Read a router that `save` wrote.

        Raises: ModelError if there is none; SettingsError for a knob out of range.
        """
        weights, bias, usual, pair = _FILE.load(path, _parts)
        return cls(weights, bias, usual=usual, pair=pair, knob=knob)

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the router as safetensors, with ``figures`` of its quality. Raises: ModelError if that fails."""
        facts = {**(figures or {}), "bias": repr(self.bias), "usual": repr(self.usual)}
        probes = dict(zip(_PROBES, (self.pair.target, self.pair.draft), strict=True))
        _FILE.save(path, {"weights": as_array(self.weights), **probes}, facts)

    def check_pair(self, target: RowRunner, draft: RowRunner) -> None:
        """Refuse a pair that the router was not trained for. Raises: ModelError."""
        for role, own, model in (("target", self.pair.target, target), ("draft model", self.pair.draft, draft)):
            is_other = bool(probe_difference(own, embedding_probe(model)))
            _FILE.check_made_for("pair", "the router", f"its {role} is another model" if is_other else "")

    def keeps(self, drafted: Step, targets: Step | None) -> bool:
        """Return whether the draft model's step is kept."""
        return self.knob == 1.0 or self.chance(drafted) < self.knob

    def chance(self, drafted: Step) -> float:
        """Return the probability that the target's step would be better."""
        return float((self.weights @ describe(drafted) + self.bias).sigmoid())
