"""Train an H-RAD predictor on recorded rounds: its network, then the weight of its predictions.

The weight is fitted on held-out rounds: the network's chances are calibrated, and compared with the drafter's own
confidence. The drafter branches at tokens below a certain probability, so a prediction helps only if it adds to
that probability. So acceptance is regressed on the log odds of both, and the regression gives the weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from card.backends.transformers.arrays import as_array, as_tensor
from card.errors import PromptError
from card.family.learning.fit import FitRule, StepLoss, constant_rate, fit
from card.family.specbranch.network import CLASSES, HIDDEN_WIDTHS, Evidence, HRad, HRadFacts, log_odds
from card.family.specbranch.rounds import Rounds, outcomes

LEAST_PROMPTS = 3  # one each to learn from, to stop by and to test
_HELD_OUT_SHARE = 0.1
_EVALUATED_ROWS = 4096  # at a time
_LEAST_PROBABILITY = 1e-9  # before calibration
_SMALLEST_STD = 1e-3  # nearly constant inputs are not amplified
_DROPOUT = 0.2  # of inputs and hidden values
_RULE = FitRule(learning_rate=3e-4, weight_decay=0.5, betas=(0.9, 0.999), schedule=constant_rate, clipped_norm=None)
_LEAST_GAIN = 2.0  # nats over all tokens; chance alone gains as much in one case of twenty
_LEAST_SCALE = 0.05  # of the scores in calibration; 0 or less would reverse the order of classes
_RIDGE = 1e-4  # nats for a squared weight of 1: makes fits with redundant inputs unique
_MOST_FITTING_STEPS = 100  # of L-BFGS, which usually ends before
_ALMOST = 1e-4  # a token is never certain
TensorLayer = tuple[Tensor, Tensor]  # weight [out, in] and bias [out]


@dataclass(frozen=True, slots=True, kw_only=True)
class HRadTrainSettings:
    """Settings of the training."""

    epochs: int = 20  # at most
    patience: int = 4  # epochs without a lower loss on the stopping part, after which training ends
    batch_size: int = 256
    balance: float = 0.25  # a class has the weight share ** -balance; 0: rounds count alike, 1: classes do
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TrainedHRad:
    """A predictor and its quality on rounds of held-out prompts."""

    hrad: HRad
    confusion: tuple[tuple[int, ...], ...]  # [true class][predicted class], rounds
    confidence_loss: float  # log loss of acceptance by the drafter's own probability, nats per drafted token
    predicted_loss: float  # the same with the predictions
    num_train_rounds: int
    num_epochs: int  # of the returned weights; later epochs did not help

    @property
    def num_test_rounds(self) -> int:
        """Rounds that the confusion matrix counts."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """Share of rounds whose class was predicted, in [0, 1]."""
        return sum(row[i] for i, row in enumerate(self.confusion)) / self.num_test_rounds

    @property
    def recalls(self) -> tuple[float, ...]:
        """Recall of each class; 0 if it has no rounds."""
        return tuple(row[i] / max(sum(row), 1) for i, row in enumerate(self.confusion))

    @property
    def precisions(self) -> tuple[float, ...]:
        """Precision of each class; 0 if it was never predicted."""
        columns = zip(*self.confusion, strict=True)
        return tuple(column[i] / max(sum(column), 1) for i, column in enumerate(columns))

    @property
    def majority_share(self) -> float:
        """Accuracy of always predicting the commonest class."""
        return max(map(sum, self.confusion)) / self.num_test_rounds

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that occur; always predicting one class gives 1 / classes."""
        occurring = [recall for recall, row in zip(self.recalls, self.confusion, strict=True) if sum(row)]
        return sum(occurring) / len(occurring)

    def figures(self) -> dict[str, str]:
        """Return these figures by name, for a file's metadata."""
        return {
            "test_rounds": str(self.num_test_rounds),
            "test_accuracy": f"{self.accuracy:.4f}",
            "test_majority_share": f"{self.majority_share:.4f}",
            "test_recalls": " ".join(f"{share:.4f}" for share in self.recalls),
            "test_precisions": " ".join(f"{share:.4f}" for share in self.precisions),
            "test_confidence_loss": f"{self.confidence_loss:.5f}",
            "test_foreseen_loss": f"{self.predicted_loss:.5f}",
        }


def train_hrad(
    rounds: Rounds,
    facts: HRadFacts,
    settings: HRadTrainSettings,
    *,
    test_rounds: Rounds | None = None,
    on_epoch: Callable[[], None] = lambda: None,
) -> TrainedHRad:
    """Train a predictor on rounds, split by prompt into training, stopping and test rounds.

    The stopping rounds also calibrate its chances and give their weight beside the drafter's own confidence.

    Args:
        test_rounds: None: those of a tenth of the prompts.
        on_epoch: called after each epoch.
    Raises: PromptError if the rounds come from too few prompts.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    prompts = torch.tensor(sorted(set(rounds.prompt_idx.tolist())))
    least = LEAST_PROMPTS - (test_rounds is not None)
    if len(prompts) < least or (test_rounds is not None and not len(test_rounds)):
        raise PromptError(
            f"{len(prompts)} prompts have answers long enough to learn from"
            f"{'' if test_rounds is None else f', and {len(test_rounds)} rounds to judge by'}; give at least {least},"
            " or longer answers"
        )
    shuffled = prompts[torch.randperm(len(prompts), generator=generator)]
    num_held_out = max(1, round(_HELD_OUT_SHARE * len(prompts)))
    stop_by, judged_by = shuffled[:num_held_out], shuffled[num_held_out : 2 * num_held_out]
    learnt_from = shuffled[2 * num_held_out :] if test_rounds is None else shuffled[num_held_out:]
    train, stop = rounds.of_prompts(learnt_from), rounds.of_prompts(stop_by)
    test = rounds.of_prompts(judged_by) if test_rounds is None else test_rounds
    mean, std = _spread(train)
    layers, num_epochs = _fit(train, stop, (mean, std), settings, generator, on_epoch)
    scores = _probabilities(_network(facts, layers, mean, std), stop).clamp_min(_LEAST_PROBABILITY).log()
    layers = calibrated(layers, scores, stop.labels)
    predicted = _log_odds(_probabilities(_network(facts, layers, mean, std), stop))
    tokens = TokenOutcomes(stop, predicted)
    hrad = _network(facts, layers, mean, std, evidence_of(tokens, float(predicted.mean())))
    probabilities = _probabilities(hrad, test)
    test_tokens = TokenOutcomes(test, _log_odds(probabilities))
    return TrainedHRad(
        hrad,
        _confusion(test.labels, probabilities.argmax(-1)),
        confidence_loss=test_tokens.loss(tokens.fit(uses_predicted=False)),
        predicted_loss=test_tokens.loss(tokens.fit(uses_predicted=True)),
        num_train_rounds=len(train),
        num_epochs=num_epochs,
    )


def _network(
    facts: HRadFacts, layers: Sequence[TensorLayer], mean: Tensor, std: Tensor, evidence: Evidence | None = None
) -> HRad:
    pairs = [(as_array(weight), as_array(bias)) for weight, bias in layers]
    return HRad(facts, pairs, as_array(mean), as_array(std), evidence or Evidence())


def _log_odds(probabilities: Tensor) -> Tensor:
    return as_tensor(log_odds(as_array(probabilities)))


def _probabilities(hrad: HRad, part: Rounds) -> Tensor:
    """Return the chances of the classes for all rounds, [N, 3] float32."""
    pieces = (as_array(part.inputs[piece].float()) for piece in _pieces(part))
    return torch.cat([as_tensor(hrad.probabilities(piece)) for piece in pieces])


def _confusion(labels: Tensor, predicted: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the confusion matrix: true classes by row, predicted ones by column."""
    counts = torch.bincount(labels * len(CLASSES) + predicted, minlength=len(CLASSES) ** 2)
    return tuple(tuple(row) for row in counts.view(len(CLASSES), len(CLASSES)).tolist())


def _pieces(part: Rounds) -> list[slice]:
    """Return slices of rounds that are small enough for one evaluation."""
    return [slice(start, start + _EVALUATED_ROWS) for start in range(0, len(part), _EVALUATED_ROWS)]


def _spread(part: Rounds) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each input, [F] float32."""
    sums = [(inputs.sum(0), inputs.square().sum(0)) for inputs in (part.inputs[p].double() for p in _pieces(part))]
    mean = torch.stack([total for total, _ in sums]).sum(0) / len(part)
    variance = torch.stack([squares for _, squares in sums]).sum(0) / len(part) - mean.square()
    return mean.float(), variance.clamp_min(0).sqrt().clamp_min(_SMALLEST_STD).float()


def _fit(
    train: Rounds,
    stop: Rounds,
    spread: tuple[Tensor, Tensor],
    settings: HRadTrainSettings,
    generator: torch.Generator,
    on_epoch: Callable[[], None],
) -> tuple[list[TensorLayer], int]:
    """Return the layers of the best epoch on the stopping rounds, and its number, counted from 1."""
    layers = _new_layers((len(spread[0]), *HIDDEN_WIDTHS, len(CLASSES)), generator)
    shares = torch.bincount(train.labels, minlength=len(CLASSES)) / len(train)
    class_weights = shares.clamp_min(1 / len(train)) ** -settings.balance

    def loss_of(part: Rounds, rows: Tensor | slice, dropout: float = 0.0) -> Tensor:
        """Return the mean cross-entropy of some rounds, weighted by class."""
        values = (part.inputs[rows].float() - spread[0]) / spread[1]
        for i, (weight, bias) in enumerate(layers):
            values = values.relu() if i else values
            if dropout:  # the remaining values are scaled up
                values = values * (torch.rand(values.shape, generator=generator) >= dropout) / (1 - dropout)
            values = functional.linear(values, weight, bias)
        labels = outcomes(part.num_accepted[rows], part.num_drafted)
        return (functional.cross_entropy(values, labels, reduction="none") * class_weights[labels]).mean()

    least_loss, best, best_epoch = math.inf, layers, 0

    def steps() -> Iterator[Tensor]:
        """Yield the rounds of each step; after each epoch evaluate the weights."""
        nonlocal least_loss, best, best_epoch
        for epoch in range(1, settings.epochs + 1):
            yield from torch.split(torch.randperm(len(train), generator=generator), settings.batch_size)
            with torch.no_grad():
                loss = sum(float(loss_of(stop, piece)) * len(stop.inputs[piece]) for piece in _pieces(stop))
            if loss < least_loss:
                least_loss, best_epoch = loss, epoch
                best = [(weight.detach().clone(), bias.detach().clone()) for weight, bias in layers]
            on_epoch()
            if epoch - best_epoch >= settings.patience:
                break

    fit(
        nn.ParameterList(itertools.chain.from_iterable(layers)),
        steps(),
        lambda _, rows: StepLoss(loss_of(train, rows, _DROPOUT), len(rows)),
        _RULE,
        num_steps=settings.epochs * math.ceil(len(train) / settings.batch_size),
    )
    return best, best_epoch


def _new_layers(widths: Sequence[int], generator: torch.Generator) -> list[TensorLayer]:
    """Return linear layers initialised for ReLU (He et al. 2015, arXiv:1502.01852)."""
    return [
        (
            nn.Parameter(torch.randn((out, into), generator=generator) * math.sqrt(2 / into)),
            nn.Parameter(torch.zeros(out)),
        )
        for into, out in itertools.pairwise(widths)
    ]


# ---- calibration and weight ------------------------------------------------------------------------------------------


def calibrated(layers: Sequence[TensorLayer], scores: Tensor, labels: Tensor) -> list[TensorLayer]:
    """Return layers whose softmax is calibrated: the scores are scaled, and moved class by class.

    Training weights classes and becomes overconfident; both are undone here. Source: Guo et al. 2017, arXiv:1706.04599;
    between their temperature and vector scaling.

    Args:
        scores: [N, 3] float32, of the layers on held-out rounds.
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
    """The drafted tokens of some rounds with an outcome, and their predicted log odds."""

    def __init__(self, rounds: Rounds, predicted: Tensor) -> None:
        """Use these rounds with the predicted log odds of each, [N] float."""
        positions = torch.arange(rounds.num_drafted)
        num_accepted = rounds.num_accepted[:, None]
        compared = positions <= num_accepted  # tokens after the first rejected one have no outcome
        confidences = rounds.confidences.double().clamp(_ALMOST, 1.0 - _ALMOST)
        self._was_accepted = (positions < num_accepted)[compared].double()
        self._confidence = confidences.logit()[compared]
        self._predicted = predicted.double()[:, None].expand(-1, rounds.num_drafted)[compared]

    def __len__(self) -> int:
        return len(self._was_accepted)

    def fit(self, *, uses_predicted: bool) -> Tensor:
        """Return constant, weight of the drafter's log odds, and weight of the predicted ones, [3] float64."""
        used = torch.tensor([1.0, 1.0, float(uses_predicted)], dtype=torch.float64)

        def loss(weights: Tensor) -> Tensor:
            return self._mean_loss(used * weights) + _RIDGE * weights.square().sum()

        return used * _minimum(loss, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))

    def loss(self, weights: Tensor) -> float:
        """Return the mean log loss, in nats per token, of acceptance as predicted with these weights."""
        return float(self._mean_loss(weights))

    def _mean_loss(self, weights: Tensor) -> Tensor:
        odds = weights[0] + weights[1] * self._confidence + weights[2] * self._predicted
        return functional.binary_cross_entropy_with_logits(odds, self._was_accepted)


def evidence_of(tokens: TokenOutcomes, mean: float) -> Evidence:
    """Return the weight of the predicted log odds, of this mean, beside the drafter's; 0 if the gain may be chance."""
    alone, both = tokens.fit(uses_predicted=False), tokens.fit(uses_predicted=True)
    gain = (tokens.loss(alone) - tokens.loss(both)) * len(tokens)
    _, drafter, predicted = both.tolist()
    return Evidence(predicted / drafter if drafter > 0 and predicted > 0 and gain > _LEAST_GAIN else 0.0, mean)


def _minimum(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the minimum of a smooth convex loss."""
    parameters = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=_MOST_FITTING_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(parameters)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return parameters.detach()
