"""Time series transformers of the library transformers, as targets and as drafts: each value is a patch of its own.

The encoder reads the context once. The decoder keeps no cache here: it reads all forecast values again in each pass,
as transformers' own `generate` does, because paths of different lengths share a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TimeSeriesTransformerForPrediction
from transformers.modeling_outputs import BaseModelOutput

from card.errors import SettingsError
from card.labs.series.laws import Gaussian

TimeFeatures = Callable[[Tensor], Tensor]  # places [T], 0 being the first value that is read, to features [T, F]


def age(places: Tensor) -> Tensor:
    """Return the only feature of a model without times: log10(2 + place), as in GluonTS."""
    return torch.log10(2.0 + places)[:, None]


class TimeSeriesModel:
    """A `TimeSeriesTransformerForPrediction` of one series with normal outputs.

    Args:
        time_features: what the model was trained with.
    Raises: SettingsError for a model with other outputs, several series, or static features.
    """

    patch_size = 1

    def __init__(self, model: TimeSeriesTransformerForPrediction, time_features: TimeFeatures = age) -> None:
        config = cast(Any, model).config  # untyped
        if config.distribution_output != "normal" or config.input_size != 1:
            raise SettingsError(
                "a time series transformer must have normal outputs and one series, got"
                f" {config.distribution_output} outputs and {config.input_size} series"
            )
        if (
            config.num_static_categorical_features
            or config.num_static_real_features
            or config.num_dynamic_real_features
        ):
            raise SettingsError("a time series transformer with static or dynamic features cannot be run; take another")
        width = time_features(torch.arange(2)).shape[-1]
        if width != config.num_time_features:
            raise SettingsError(f"time_features must give {config.num_time_features} features, got {width}")
        self.num_read = config.context_length + max(config.lags_sequence)  # values
        self.max_patches = self.num_read + config.prediction_length
        self._model, self._time_features = model.train(False), time_features

    def open(self, context: Tensor, num_paths: int, num_patches: int) -> TimeSeriesPaths:
        """Begin paths after a context [N, 1]. Raises: SettingsError if it is too short."""
        if len(context) < self.num_read:
            raise SettingsError(f"this model must read {self.num_read} values, the series has {len(context)}")
        return TimeSeriesPaths(self._model, self._time_features, context[:, 0], self.num_read, num_paths)


class TimeSeriesPaths:
    """Paths of a time series transformer."""

    def __init__(
        self,
        model: TimeSeriesTransformerForPrediction,
        time_features: TimeFeatures,
        context: Tensor,
        num_read: int,
        num_paths: int,
    ) -> None:
        self._model: Any = model
        self._begin, config = len(context), cast(Any, model).config
        num_future: int = config.prediction_length
        self._past = context[None, -num_read:]
        features = time_features(torch.arange(num_read + num_future, device=context.device))[None].to(context.dtype)
        self._past_features, self._future_features = features[:, :num_read], features[:, num_read:]
        self._future = context.new_zeros(num_paths, num_future)
        self._encoded = self._run(self._future[:1], None).encoder_last_hidden_state

    @torch.no_grad()
    def extend(self, patches: Tensor, starts: Tensor) -> Gaussian:
        """Read values [B, T, 1] at the places from ``starts`` on; return the laws after each of them.

        Places within the context have the law of the first value after it; places beyond the forecast, of its last.
        """
        num_future = self._future.shape[1]
        places = starts[:, None] + torch.arange(patches.shape[1], device=patches.device) - self._begin
        rows, columns = ((places >= 0) & (places < num_future)).nonzero(as_tuple=True)
        self._future[rows, places[rows, columns]] = patches[rows, columns, 0]
        output = self._run(self._future, self._encoded)
        params = self._model.output_params(output.last_hidden_state)
        law = self._model.output_distribution(params, loc=output.loc, scale=output.scale)
        asked = (places + 1).clamp(0, num_future - 1)
        mean, std = (one.gather(1, asked)[..., None] for one in (law.mean, law.stddev))
        return Gaussian(mean, std)

    def keep(self, rows: Tensor) -> None:
        """Keep only some of the paths."""
        self._future = self._future[rows]

    @torch.no_grad()
    def _run(self, future: Tensor, encoded: Tensor | None) -> Any:
        """Return the decoder's output for values after the context: [B, prediction_length]."""
        count = len(future)
        past = self._past.expand(count, -1)
        outputs = None if encoded is None else BaseModelOutput(last_hidden_state=encoded.expand(count, -1, -1))
        return self._model.model(
            past_values=past,
            past_time_features=self._past_features.expand(count, -1, -1),
            past_observed_mask=torch.ones_like(past),
            future_values=future,
            future_time_features=self._future_features.expand(count, -1, -1),
            encoder_outputs=outputs,
            use_cache=False,
        )
