"""Time series transformers of transformers: their forecasts have the law of their own `generate`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

from card.errors import SettingsError
from card.labs.series.forecaster import forecast
from card.labs.series.hf import TimeSeriesModel, age
from card.labs.series.transformer import PatchTransformer, Shape
from tests.labs.series.models import tiny_forecaster

NUM_PATHS, HORIZON = 3000, 5


def tiny_model(seed: int = 0, **changes) -> TimeSeriesTransformerForPrediction:
    sizes = {"context_length": 6, "prediction_length": HORIZON, "lags_sequence": [1, 2, 3], "num_time_features": 1}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = TimeSeriesTransformerConfig(**{**sizes, **layers, "distribution_output": "normal", **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TimeSeriesTransformerForPrediction(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return model.train(False)


def series() -> np.ndarray:
    values = np.sin(np.arange(9.0)) + 0.3 * np.cos(3 * np.arange(9.0))
    return (values - values.mean()) / values.std()  # already as a forecast normalises it


def own_samples(model: TimeSeriesTransformerForPrediction) -> np.ndarray:
    """Return what transformers itself draws: [NUM_PATHS, HORIZON]."""
    past = torch.from_numpy(series()).float()[None]
    model.config.num_parallel_samples = NUM_PATHS
    features = age(torch.arange(9 + HORIZON))[None]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        drawn = model.generate(
            past_values=past,
            past_time_features=features[:, :9],
            past_observed_mask=torch.ones_like(past),
            future_time_features=features[:, 9:],
        )
    return drawn.sequences[0].double().numpy()


def off(one: np.ndarray, other: np.ndarray) -> float:
    """Return by how many standard errors means, deviations and steps of two sets of paths differ at most."""
    errors = []
    for a, b in ((one, other), (np.diff(one), np.diff(other))):
        errors += [np.abs(a.mean(0) - b.mean(0)) / np.hypot(a.std(0), b.std(0)) * math.sqrt(NUM_PATHS)]
        errors += [np.abs(np.log(a.std(0) / b.std(0))) * math.sqrt(NUM_PATHS)]
    return float(max(error.max() for error in errors))


@pytest.mark.parametrize(
    "draft", [TimeSeriesModel(tiny_model(1)), tiny_forecaster(2, Shape(patch_size=1, width=16, num_heads=2))]
)
def test_speculated_forecasts_have_the_law_of_transformers_own_generate(draft: TimeSeriesModel | PatchTransformer):
    model = tiny_model()
    theirs = own_samples(model)
    made = forecast(series(), HORIZON, TimeSeriesModel(model), draft, num_samples=NUM_PATHS, seed=1)
    assert made.exact and 0.0 < made.stats.acceptance_rate < 1.0
    assert off(made.samples, theirs) < 6.0
    lenient = {"num_samples": NUM_PATHS, "mode": "tolerance", "tolerance": 4.0}
    control = forecast(series(), HORIZON, TimeSeriesModel(model), draft, **lenient)
    assert off(control.samples, theirs) > 9.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distribution_output": "student_t"}, "normal outputs"),
        ({"num_time_features": 2}, "must give 2 features, got 1"),
        ({"num_static_real_features": 1}, "static or dynamic features"),
    ],
)
def test_a_model_of_another_kind_is_refused_in_one_line(changes, said):
    with pytest.raises(SettingsError, match=said):
        TimeSeriesModel(tiny_model(**changes))


def test_a_series_shorter_than_what_the_model_must_read_is_refused():
    with pytest.raises(SettingsError, match="must read 9 values, the series has 8"):
        forecast(series()[:8], HORIZON, TimeSeriesModel(tiny_model()))
