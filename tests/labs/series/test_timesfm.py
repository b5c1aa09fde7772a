"""TimesFM models of transformers: their laws are made of their own forecasts, and speculation keeps these laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    TimesFm2_5Config,
    TimesFm2_5ModelForPrediction,
    TimesFmConfig,
    TimesFmModelForPrediction,
)

from card.errors import SettingsError
from card.labs.series.forecaster import forecast
from card.labs.series.timesfm import TimesFmForecaster

PATCH, NUM_PATHS, HORIZON = 4, 1500, 12
SIZES = {
    "patch_length": PATCH,
    "context_length": 48,
    "horizon_length": 8,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "head_dim": 8,
    "num_attention_heads": 2,
}


def tiny_old(seed: int = 0, **changes: Any) -> TimesFmModelForPrediction:
    return randomised(lambda: TimesFmModelForPrediction(TimesFmConfig(**{**SIZES, **changes})), seed)


def tiny_new(seed: int = 0, **changes: Any) -> TimesFm2_5ModelForPrediction:
    sizes = {**SIZES, "num_key_value_heads": 2, "output_quantile_len": 8, "max_position_embeddings": 64, **changes}
    return randomised(lambda: TimesFm2_5ModelForPrediction(TimesFm2_5Config(**sizes)), seed)


def randomised(make: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    return model.train(False)


KINDS = {
    "2.0": tiny_old,
    "2.0 with positions": lambda seed=0: tiny_old(seed, use_positional_embedding=True),
    "2.5": tiny_new,
    "2.5 without its options": lambda seed=0: tiny_new(
        seed, force_flip_invariance=False, use_continuous_quantile_head=False
    ),
}


def series(num_values: int = 24) -> torch.Tensor:
    steps = torch.arange(num_values).float()
    return torch.sin(steps) + 0.3 * torch.cos(3 * steps) - 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_law_has_the_models_own_point_forecast_and_the_width_of_its_quantiles_at_every_place(kind: str) -> None:
    model = KINDS[kind]()
    law = TimesFmForecaster(model).laws(series().view(1, -1, PATCH))
    for num_values in (12, 20, 24):
        with torch.no_grad():
            options = {} if "2.5" in kind else {"freq": [0]}
            own = model(past_values=[series()[:num_values]], truncate_negative=False, **options)
        place = num_values // PATCH - 1
        torch.testing.assert_close(law.mean[0, place], own.mean_predictions[0, :PATCH], atol=2e-4, rtol=2e-4)
        low, high = own.full_predictions[0, :PATCH, 1], own.full_predictions[0, :PATCH, 9]
        width = 2 * NormalDist().inv_cdf(0.9)
        expected = ((high - low).abs() / width).clamp_min(1e-3)
        torch.testing.assert_close(law.std[0, place], expected, atol=2e-4, rtol=2e-4)


def test_paths_of_different_lengths_have_the_laws_of_their_own_places() -> None:
    model = TimesFmForecaster(tiny_old())
    patches = series().view(1, -1, PATCH)
    paths = model.open(patches[0, :3], 2, 6)
    starts = torch.tensor([2, 1])
    found = paths.extend(torch.stack((patches[0, 2:4], patches[0, 1:3])), starts)
    for row, start in enumerate(starts.tolist()):
        expected = model.laws(patches[:, : start + 2])[0, start : start + 2]
        torch.testing.assert_close(found.mean[row], expected.mean, atol=1e-5, rtol=1e-5)


def off(one: np.ndarray, other: np.ndarray) -> float:
    """Return by how many standard errors means and deviations of two sets of paths differ at most."""
    means = np.abs(one.mean(0) - other.mean(0)) / np.hypot(one.std(0), other.std(0)) * math.sqrt(NUM_PATHS)
    spreads = np.abs(np.log(one.std(0) / other.std(0))) * math.sqrt(NUM_PATHS)
    return float(max(means.max(), spreads.max()))


@pytest.mark.parametrize("kind", ["2.0", "2.5"])
def test_speculated_forecasts_have_the_law_of_the_target_alone(kind: str) -> None:
    target, other = TimesFmForecaster(KINDS[kind]()), KINDS[kind]()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    draft = TimesFmForecaster(other)
    values = series().numpy()
    alone = forecast(values, HORIZON, target, num_samples=NUM_PATHS, seed=1)
    made = forecast(values, HORIZON, target, draft, num_samples=NUM_PATHS, seed=2)
    assert made.exact and 0.0 < made.stats.acceptance_rate < 1.0
    assert off(made.samples, alone.samples) < 6.0
    drafted = forecast(values, HORIZON, draft, num_samples=NUM_PATHS, seed=3)
    assert off(drafted.samples, alone.samples) > 9.0


def test_a_model_that_drafts_for_itself_is_always_accepted() -> None:
    model = TimesFmForecaster(tiny_new())
    made = forecast(series().numpy(), HORIZON, model, TimesFmForecaster(tiny_new()), num_samples=50)
    assert made.stats.acceptance_rate == 1.0 and made.stats.patches_per_round > 1.0


def test_a_model_that_states_less_than_a_patch_is_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match="forecast a whole patch and two quantiles or more, got a horizon of 2"):
        TimesFmForecaster(tiny_old(horizon_length=2))
