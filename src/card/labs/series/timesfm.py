"""TimesFM models of the library transformers, as targets and as drafts: patches with laws made from their quantiles.

TimesFM gives quantiles and no samples. Here the law of the next patch is normal: its mean is the model's point
forecast, and its deviation fits the distance of the outermost quantiles. Exactness refers to this law.
There is no KV cache: all patches are read again in each pass, as in transformers' own modules.

Source: Das et al. 2024, arXiv:2310.10688.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TimesFm2_5ModelForPrediction, TimesFmModelForPrediction

from card.errors import SettingsError
from card.labs.series.laws import Gaussian

_LEAST_STD = 1e-3  # of the normalised series, where quantiles meet


class TimesFmForecaster:
    """A `TimesFmModelForPrediction` or a `TimesFm2_5ModelForPrediction`.

    Args:
        frequency: 0, 1 or 2, for high, medium or low; the former alone reads it.
    Raises: SettingsError for a model whose horizon is shorter than a patch, or with fewer than two quantiles.
    """

    def __init__(self, model: TimesFmModelForPrediction | TimesFm2_5ModelForPrediction, frequency: int = 0) -> None:
        config = cast(Any, model).config  # untyped
        horizon = min(config.horizon_length, getattr(config, "output_quantile_len", config.horizon_length))
        if horizon < config.patch_length or len(config.quantiles) < 2:
            raise SettingsError(
                "a TimesFM must forecast a whole patch and two quantiles or more, got a horizon of"
                f" {horizon}, patches of {config.patch_length} and {len(config.quantiles)} quantiles"
            )
        self.patch_size: int = config.patch_length
        self.max_patches: int = config.context_length // config.patch_length
        self._model: Any = model.train(False)
        self._config, self._frequency = config, frequency
        levels = list(config.quantiles)
        self._ends = 1 + levels.index(min(levels)), 1 + levels.index(max(levels))
        self._width = NormalDist().inv_cdf(max(levels)) - NormalDist().inv_cdf(min(levels))  # standard deviations

    def open(self, context: Tensor, num_paths: int, num_patches: int) -> TimesFmPaths:
        """Begin paths after a context [N, P]; each has room for ``num_patches``."""
        return TimesFmPaths(self, context, num_paths, num_patches)

    @torch.no_grad()
    def laws(self, patches: Tensor) -> Gaussian:
        """Return the law of the patch after each one: [B, T, P] to laws at B rows and T places."""
        point, quantiles = (
            self._old(patches) if isinstance(self._model, TimesFmModelForPrediction) else self._new(patches)
        )
        low, high = (quantiles[..., idx] for idx in self._ends)
        return Gaussian(point, ((high - low).abs() / self._width).clamp_min(_LEAST_STD))

    def _old(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return the point forecast [B, T, P] after each patch, and with the quantiles: [B, T, P, 1 + Q]."""
        values = patches.flatten(1)
        frequency = torch.full((len(patches), 1), self._frequency, dtype=torch.int32, device=patches.device)
        read = self._model.decoder(past_values=values, past_values_padding=torch.zeros_like(values), freq=frequency)
        output = self._model._postprocess_output(read.last_hidden_state, (read.loc, read.scale))[
            :, :, : self.patch_size
        ]
        return output[..., 0], output

    def _new(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for TimesFM 2.5, whose second head sets the quantiles around the first one's median."""
        first, second = self._heads(patches)
        if self._config.force_flip_invariance:
            turned = [torch.cat((one[..., :1], one[..., 1:].flip(-1)), -1) for one in self._heads(-patches)]
            first, second = ((one - other) / 2 for one, other in zip((first, second), turned, strict=True))
        median = self._config.decode_index
        point = first[..., median]
        if not self._config.use_continuous_quantile_head:
            return point, first
        return point, second - second[..., median : median + 1] + point[..., None]

    def _heads(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        model = self._model
        read = model.model(past_values=patches.flatten(1))
        stated = []
        for head in (model.output_projection_point, model.output_projection_quantiles):
            scaled = model.model._revin(head(read.last_hidden_state), read.context_mu, read.context_sigma, reverse=True)
            stated.append(scaled.unflatten(-1, (-1, 1 + len(self._config.quantiles)))[:, :, : self.patch_size])
        return stated[0], stated[1]


class TimesFmPaths:
    """Paths of a TimesFM."""

    def __init__(self, model: TimesFmForecaster, context: Tensor, num_paths: int, num_patches: int) -> None:
        self._model = model
        self._patches = context.new_zeros(num_paths, num_patches, context.shape[1])
        self._patches[:, : len(context)] = context

    def extend(self, patches: Tensor, starts: Tensor) -> Gaussian:
        """Read patches [B, T, P] that begin at the places ``starts`` [B]; return the laws after each of them."""
        rows = torch.arange(len(patches), device=patches.device)[:, None]
        places = starts[:, None] + torch.arange(patches.shape[1], device=patches.device)
        self._patches[rows, places] = patches
        # Attention is causal, so values beyond the end of a shorter path do not matter.
        return self._model.laws(self._patches[:, : int(places.max()) + 1])[rows, places]

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the paths."""
        self._patches = self._patches[rows]
