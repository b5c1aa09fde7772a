"""H-RAD, the predictor of SpecBranch: how far a chain of drafted tokens will be accepted, from the target's features.

A small network reads the target's hidden states at its newest token, and that token's embedding.
Source: Shen et al. 2025, "Speculative Decoding via Hybrid Drafting and Rollback-Aware Branch Parallelism",
arXiv:2506.01979 (hidden states of the last 4 layers; a network of widths 256 and 64). Ours: the branch point does not
depend on the likeliest outcome alone, unless "obey:" stands before the predictor's name. The chances of all outcomes
are evidence besides the drafter's own confidence, with a weight that was fitted on held-out rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from card.config import DraftSettings, EngineSettings
from card.errors import ModelError
from card.family.specbranch.record import HRadSettings
from card.kernels.number_types import Array, Floats
from card.models.features import FeatureWish, Rows, SeenRows
from card.models.files.trained_file import TrainedFile
from card.models.fingerprint import TargetSizes, sizes_of, target_difference
from card.models.runner import RowRunner
from card.tree.logits import softmax

ALL_REJECTED, UNDECIDED, ALL_ACCEPTED = CLASSES = (0, 1, 2)  # none, some or all of a chain is accepted
OFF, DEMO_HRAD = "off", "demo"  # no predictor; the predictor of the demo pair
OBEY = "obey:"  # before a predictor's name: its likeliest outcome decides, as published
HIDDEN_WIDTHS = (256, 64)
_DEMO_FILE = Path(__file__).with_name("demo.safetensors")

_FILE = TrainedFile("predictor", "card-hrad-2", "card train hrad")
_STORED_DTYPE = np.float16  # inputs are standardised, so no weight is far from 1
_LEAST_PROBABILITY = 1e-4  # no outcome is impossible

LinearWeights = tuple[Floats, Floats]  # weight [out, in] and bias [out] of a linear layer, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class HRadFacts(TargetSizes):
    """Facts of a predictor's training."""

    num_layers: int  # last layers of the target whose hidden states are inputs
    num_speculative_tokens: int  # K: length of the chains
    draft: str  # name of the draft model whose tokens were counted

    @property
    def num_inputs(self) -> int:
        """Width of hidden states and embedding together."""
        return (self.num_layers + 1) * self.hidden_size


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence in the log odds of ALL_ACCEPTED against ALL_REJECTED beyond a drafted token's own probability."""

    weight: float = 0.0  # 0: none; 1: the weight of evidence that is independent of the drafter's
    mean: float = 0.0  # of these log odds over many rounds, which moves nothing


class HRad:
    """Predicts how much of a chain of drafted tokens will be accepted: none, some, or all.

    After `attach` it is a consumer of a target's features.
    """

    wish: FeatureWish

    def __init__(
        self,
        facts: HRadFacts,
        layers: Sequence[LinearWeights],
        mean: Floats,
        std: Floats,
        evidence: Evidence = Evidence(),
    ) -> None:
        """Make the predictor from its network.

        Args:
            layers: linear layers with ReLU between them, from facts.num_inputs to three scores; float32.
                Weights are rounded to the precision of a file, so that a saved predictor is identical.
            mean, std: [facts.num_inputs] float32, of the inputs' standardisation.
            evidence: how the outcomes move the drafter's branch point.
        Raises: ModelError if the shapes do not fit.
        """
        widths = [facts.num_inputs, *(len(bias) for _, bias in layers)]
        shapes = [list(one.shape) for layer in layers for one in layer]
        wanted = [shape for into, out in itertools.pairwise(widths) for shape in ([out, into], [out])]
        if shapes != wanted or widths[-1] != len(CLASSES) or not mean.shape == std.shape == (widths[0],):
            raise ModelError(
                f"layers of shapes {shapes} with {len(mean)} means and {len(std)} deviations are no network from"
                f" {widths[0]} inputs to {len(CLASSES)} scores"
            )
        self.facts = facts
        self.evidence = evidence
        self.layers = [(weight.astype(_STORED_DTYPE).astype(np.float32), bias) for weight, bias in layers]
        self._mean, self._std = mean, std

    @classmethod
    def load(cls, path: str | Path) -> HRad:
        """Read a predictor that `save` wrote, or the demo pair's ("demo"). Raises: ModelError if there is none."""
        path = _DEMO_FILE if str(path) == DEMO_HRAD else path
        return _FILE.load(path, cls._of, f", or name {DEMO_HRAD}")

    @classmethod
    def _of(cls, facts: Mapping[str, str], arrays: dict[str, Array]) -> HRad:
        stored = {name: array.astype(np.float32) for name, array in arrays.items()}
        numbers: dict[str, Any] = {one.name: int(facts[one.name]) for one in fields(HRadFacts)[:-1]}
        layers = [(stored[f"{i}.weight"], stored[f"{i}.bias"]) for i in range(sum(".weight" in one for one in stored))]
        evidence = Evidence(float(facts["evidence_weight"]), float(facts["evidence_mean"]))
        if not (0.0 <= evidence.weight < math.inf and math.isfinite(evidence.mean) and (stored["std"] > 0.0).all()):
            raise ValueError(f"{evidence} or the least deviation, {stored['std'].min():g}, is out of range")
        return cls(HRadFacts(**numbers, draft=facts["draft"]), layers, stored["mean"], stored["std"], evidence)

    def save(self, path: str | Path, figures: Mapping[str, str] | None = None) -> None:
        """Write the predictor as safetensors, weights in float16.

        Args:
            figures: of its quality, by name, for readers of the file.
        Raises: ModelError if it cannot be written.
        """
        arrays: dict[str, Array] = {"mean": self._mean, "std": self._std}
        for i, (weight, bias) in enumerate(self.layers):
            arrays[f"{i}.weight"], arrays[f"{i}.bias"] = weight.astype(_STORED_DTYPE), bias
        facts = {name: str(value) for name, value in asdict(self.facts).items()}
        learnt = {f"evidence_{name}": repr(value) for name, value in asdict(self.evidence).items()}
        _FILE.save(path, arrays, {**(figures or {}), **facts, **learnt})

    def attach(self, runner: RowRunner, usual: float, *, is_obeyed: bool = False) -> None:
        """Read a target's features from now on, and move ``usual`` by them.

        Args:
            is_obeyed: the likeliest outcome alone decides, as published.
        Raises: ModelError if the predictor was trained for another target.
        """
        _FILE.check_made_for("target", "the predictor", target_difference(self.facts, runner))
        self.wish = last_states(runner, self.facts.num_layers, "last")
        self._runner, self._usual, self._is_obeyed = runner, usual, is_obeyed

    def observe(self, seen: SeenRows) -> float | None:
        """Return the probability below which the drafter branches; None without a drafter."""
        return self.branch_below(seen.features[-1], seen.token_ids[-1]) if seen.has_drafter else None

    def branch_below(self, features_row: Floats, new_token_id: int) -> float:
        """Return the probability below which drafted tokens are unsure after a new token, in [0, 1].

        The more likely a rejection, the higher the confidence that the drafter needs not to branch. In log odds it is
        the usual value, moved by the weighted difference of the predicted log odds from their mean. 0 and 1 stay.
        A predictor that is obeyed gives 1 for ALL_REJECTED (branch at once), 0 for ALL_ACCEPTED (branch nowhere) and
        the usual value for UNDECIDED.

        Args:
            features_row: [num_layers * D] floating, the features of the row whose logits gave the token.
        """
        if not (self._is_obeyed or 0.0 < self._usual < 1.0):
            return self._usual
        values = np.concatenate((features_row, self._runner.embeddings([new_token_id])[0]))
        probabilities = self.probabilities(values)
        if self._is_obeyed:
            return {ALL_REJECTED: 1.0, ALL_ACCEPTED: 0.0}.get(int(probabilities.argmax()), self._usual)
        odds = self.evidence.weight * (float(log_odds(probabilities)) - self.evidence.mean)
        return 0.5 + 0.5 * math.tanh(0.5 * (math.log(self._usual / (1.0 - self._usual)) - odds))  # without overflow

    def probabilities(self, features: Floats) -> Floats:
        """Return the chance of each of CLASSES, [..., 3] float32.

        Args:
            features: [..., facts.num_inputs] float32: hidden states and embedding.
        """
        values = (features - self._mean) / self._std
        *hidden, (weight, bias) = self.layers
        for hidden_weight, hidden_bias in hidden:
            values = np.maximum(values @ hidden_weight.T + hidden_bias, 0)
        return softmax(values @ weight.T + bias).astype(np.float32)


def log_odds(probabilities: Floats) -> Floats:
    """Return the log odds of ALL_ACCEPTED against ALL_REJECTED, [...], for the chances of the classes, [..., 3]."""
    logprobs = np.log(np.maximum(probabilities, np.float32(_LEAST_PROBABILITY)))
    odds: Floats = logprobs[..., ALL_ACCEPTED] - logprobs[..., ALL_REJECTED]
    return odds


def last_states(runner: RowRunner, num_layers: int, rows: Rows) -> FeatureWish:
    """Return the wish for the last ``num_layers`` hidden states. Raises: ModelError if the model has fewer layers."""
    if not 1 <= num_layers <= runner.original.num_layers:
        raise ModelError(
            f"features are the hidden states of the last 1 to {runner.original.num_layers} layers of this model, got"
            f" {num_layers}; ask for fewer layers"
        )
    return FeatureWish(tuple(range(-num_layers, 0)), rows)


def hrad_consumers(settings: EngineSettings, runner: RowRunner, draft: DraftSettings) -> list[HRad]:
    """Return the consumers of the features of ``runner``, a target; none if they could not move a branch point.

    Args:
        settings: name a predictor, "off" or as of `HRad.load`, with its errors; "obey:" may stand before the name.
        draft: has the usual probability below which the drafter branches.
    """
    predictor = settings.of(HRadSettings).hrad
    if predictor == OFF:
        return []
    hrad, is_obeyed = HRad.load(predictor.removeprefix(OBEY)), predictor.startswith(OBEY)
    hrad.attach(runner, draft.branch_below, is_obeyed=is_obeyed)
    return [hrad] if is_obeyed or hrad.evidence.weight > 0.0 else []


def target_facts(runner: RowRunner, *, num_layers: int, draft: str, num_speculative_tokens: int) -> HRadFacts:
    """Return the facts of a new predictor for the target of ``runner``."""
    facts: dict[str, Any] = {"num_layers": num_layers, "num_speculative_tokens": num_speculative_tokens, "draft": draft}
    return HRadFacts(**facts, **sizes_of(runner))
