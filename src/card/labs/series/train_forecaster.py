"""Train a forecaster on windows of series, by likelihood."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from card.family.learning.checkpoint import Checkpoint
from card.family.learning.fit import FitRule, StepLoss, fit
from card.labs.series.data import Values, checked_series
from card.labs.series.transformer import PatchTransformer, Shape

LEAST_PATCHES = 8  # of a series to learn from
_HELD_OUT_SHARE = 0.1
_WARM_STEPS = 50
_LEAST_SPREAD = 0.02  # least deviation of a context, relative to its series: nearly constant contexts are not amplified
_NUM_JUDGED = 256  # windows of the held-out part


def _rate_share(step: int, num_steps: int) -> float:
    """Return the share of the learning rate: warm-up, then half a cosine."""
    return min(1.0, (step + 1) / _WARM_STEPS) * 0.5 * (1 + math.cos(math.pi * step / num_steps))


_RULE = FitRule(learning_rate=1e-3, weight_decay=0.05, betas=(0.9, 0.999), schedule=_rate_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of the training."""

    steps: int = 1000
    batch_size: int = 16
    seed: int = 0
    checkpoint_steps: int = 50  # between two checkpoints


@dataclass(frozen=True, slots=True)
class TrainedForecaster:
    """A forecaster and its loss on the newest tenth of each series, which it did not learn from."""

    model: PatchTransformer
    held_out_loss: float  # nats a value: negative log-likelihood, in a series normalised by each context


def train_forecaster(
    series: Sequence[Values],
    shape: Shape,
    settings: TrainSettings,
    *,
    checkpoint: Checkpoint | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> TrainedForecaster:
    """Train a forecaster, from the last checkpoint if there is one; the weights are those of an uninterrupted run.

    Args:
        series: each [T]; windows are taken from all of them.
        checkpoint: stores the state every few steps, and refuses that of another run.
        on_step: called at the start and after each step, with the number of steps done.
    Raises: SettingsError if a series is too short, constant or has gaps; ModelError for a checkpoint that is damaged or
        of another run.
    """
    checked = [checked_series(one, LEAST_PATCHES * shape.patch_size) for one in series]
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = PatchTransformer(shape)
    windows = _Windows(checked, shape, is_held_out=False)
    fit(
        model,
        (windows.draw(settings.batch_size, generator) for _ in range(settings.steps)),
        lambda _, drawn: StepLoss(_loss(model, *drawn)),
        replace(_RULE, checkpoint_steps=settings.checkpoint_steps),
        num_steps=settings.steps,
        facts={**asdict(settings), **asdict(shape), "series": _digest(checked)},
        checkpoint=checkpoint,
        on_step=lambda step, _: on_step(step),
    )
    with torch.no_grad():
        loss = _loss(model, *_Windows(checked, shape, is_held_out=True).draw(_NUM_JUDGED, generator))
    return TrainedForecaster(model, float(loss))


def _digest(series: Sequence[Values]) -> str:
    return hashlib.sha256(b"".join(one.tobytes() for one in series)).hexdigest()[:16]


def _loss(model: PatchTransformer, patches: Tensor, is_judged: Tensor) -> Tensor:
    """Return the mean loss of a value, in nats, over the patches [B, N, P] that ``is_judged`` [B, N - 1] marks."""
    losses = -model(patches[:, :-1]).log_prob(patches[:, 1:])
    mean: Tensor = losses[is_judged].mean()
    return mean / patches.shape[-1]


class _Windows:
    """Windows of series, each normalised by a context at its beginning; only patches after the context are judged.

    A forecast knows mean and deviation of its context only, so the model must not learn with those of the future.
    """

    def __init__(self, series: Sequence[Values], shape: Shape, *, is_held_out: bool) -> None:
        self._size = shape.patch_size
        self._num_patches = min(shape.max_patches, *(len(one) // shape.patch_size // 2 for one in series))
        length = self._num_patches * self._size
        self._spreads = [float(one.std()) for one in series]
        cuts = [max(length, int(len(one) * (1 - _HELD_OUT_SHARE))) for one in series]
        parts = [one[cut - length :] if is_held_out else one[:cut] for one, cut in zip(series, cuts, strict=True)]
        self._parts = [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]

    def draw(self, num_windows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return windows [B, N, P] and which patches after the first are judged [B, N - 1]."""
        length, windows, spreads = self._num_patches * self._size, [], []
        for which in torch.randint(len(self._parts), (num_windows,), generator=generator).tolist():
            part = self._parts[which]
            start = int(torch.randint(len(part) - length + 1, (), generator=generator))
            windows.append(part[start : start + length])
            spreads.append(self._spreads[which])
        values = torch.stack(windows).view(num_windows, self._num_patches, self._size)
        num_read = torch.randint(2, self._num_patches, (num_windows,), generator=generator)
        is_read = torch.arange(self._num_patches) < num_read[:, None]
        weights = is_read[..., None] / (num_read * self._size)[:, None, None]
        level = (weights * values).sum((1, 2), keepdim=True)
        spread = (weights * (values - level).square()).sum((1, 2), keepdim=True).sqrt()
        least = _LEAST_SPREAD * torch.tensor(spreads, dtype=values.dtype)[:, None, None]
        return ((values - level) / torch.maximum(spread, least)).float(), ~is_read[:, 1:]
