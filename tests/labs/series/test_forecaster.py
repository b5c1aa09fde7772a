"""Forecasts: their law is the target's own, the cache gives what a full pass gives, and bad input is one line."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from card.errors import CardError, ModelError, SettingsError
from card.labs.series.decoding import ForecastPair, sample_paths
from card.labs.series.forecaster import forecast, load_forecaster, save_forecaster
from card.labs.series.transformer import Shape
from card.labs.series.verify import find_rule
from tests.labs.series.laws import normal_excess
from tests.labs.series.models import TINY, Walk, counting_passes, tiny_forecaster

NUM_PATHS, NUM_STEPS = 8000, 4
BOUND = 8.0


def walked(mode: str, num_ahead: int, draft: Walk | None) -> torch.Tensor:
    """Return paths of a walk that begins at 1: [NUM_PATHS, NUM_STEPS]."""
    pair = ForecastPair(Walk(0.8, 1.0), draft, find_rule(mode), num_ahead)
    context = torch.ones(2, 1, dtype=torch.float64)
    paths, stats = sample_paths(pair, context, NUM_STEPS, NUM_PATHS, torch.Generator().manual_seed(num_ahead))
    assert stats.num_patches == NUM_PATHS * NUM_STEPS
    return paths[:, :, 0]


def excess_of_steps(paths: torch.Tensor) -> float:
    """Return how far the steps of paths, and sums of two of them, are off the walk's law."""
    before = torch.cat((torch.ones(NUM_PATHS, 1, dtype=torch.float64), paths[:, :-1]), 1)
    noise = paths - 0.8 * before
    marginal = max(normal_excess(noise[:, step], 0.0, 1.0) for step in range(NUM_STEPS))
    sums = max(normal_excess(noise[:, step] + noise[:, step - 1], 0.0, math.sqrt(2)) for step in range(1, NUM_STEPS))
    return max(marginal, sums)


@pytest.mark.parametrize("num_ahead", [1, 2, 3, 6])
@pytest.mark.parametrize("draft", [Walk(0.8, 1.0), Walk(0.5, 1.3), Walk(1.1, 0.6)], ids=["same", "wider", "narrower"])
def test_whole_paths_have_the_targets_law_however_far_the_draft_looks_ahead(draft, num_ahead):
    assert excess_of_steps(walked("exact", num_ahead, draft)) < BOUND


@pytest.mark.parametrize("mode", ["redraw", "averaged", "adaptive", "tolerance"])
def test_the_same_check_rejects_paths_of_each_published_rule(mode):
    assert excess_of_steps(walked(mode, 2, Walk(0.5, 0.7))) > 2 * BOUND


def test_a_cached_round_states_the_laws_of_a_full_pass_also_after_rejected_patches():
    model, generator = tiny_forecaster(), torch.Generator().manual_seed(1)
    text = torch.randn(3, 12, 2, generator=generator)
    text[:, :4] = text[0, :4]
    paths = model.open(text[0, :4], 3, 14)
    lengths = torch.tensor([4, 6, 5])
    with torch.no_grad():
        paths.extend(torch.randn(3, 5, 2, generator=generator), torch.full((3,), 3))  # all but the first is wrong
        paths.extend(text[:, 3:8], torch.full((3,), 3))  # what each path then committed
        rows = torch.arange(3)[:, None]
        law = paths.extend(text[rows, lengths[:, None] - 1 + torch.arange(4)], lengths - 1)
        for row, length in enumerate(lengths.tolist()):
            full = model(text[row : row + 1, : length + 3])[0, length - 1 :]
            torch.testing.assert_close(law.mean[row], full.mean, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(law.std[row], full.std, atol=1e-5, rtol=1e-4)
        paths.keep(torch.tensor([2, 0]))
        law = paths.extend(text[[2, 0], 7:9], torch.tensor([7, 7]))
        full = model(text[[2, 0], :9])[:, 7:]
        torch.testing.assert_close(law.mean, full.mean, atol=1e-5, rtol=1e-4)


def test_a_round_costs_one_pass_over_what_is_new():
    target, draft = tiny_forecaster(), tiny_forecaster()
    with counting_passes(target) as passes:
        made = forecast(np.sin(np.arange(20.0)), 16, target, draft, num_samples=3, num_speculative_patches=3)
    assert made.stats.acceptance_rate > 0.99  # up to rounding the draft is the target itself
    assert passes == [(1, 7), (3, 4), (3, 4)]  # the context once; 8 patches in two rounds, bonus patches included
    assert made.stats.num_target_passes == 2
    assert made.stats.patches_per_round == 4.0


def test_speculated_forecasts_of_transformers_have_the_moments_of_plain_ones():
    series = np.cumsum(np.random.default_rng(0).normal(size=40))
    plain = forecast(series, 8, tiny_forecaster(0), num_samples=4000, seed=1)
    quick = forecast(series, 8, tiny_forecaster(0), tiny_forecaster(1), num_samples=4000, seed=2)
    control = forecast(series, 8, tiny_forecaster(0), tiny_forecaster(1), num_samples=4000, seed=2, mode="adaptive")
    assert (plain.exact, quick.exact, control.exact) == (True, True, False)
    assert 0.0 < quick.stats.acceptance_rate < 1.0

    def off(other) -> float:
        errors = plain.samples.std(0) * math.sqrt(2 / 4000)
        spreads = np.abs(np.log(other.samples.std(0) / plain.samples.std(0))) * math.sqrt(4000)
        return float(max((np.abs(other.mean - plain.mean) / errors).max(), spreads.max()))

    assert off(quick) < 6.0
    assert off(control) > 8.0


def test_the_same_seed_gives_the_same_forecast_and_levels_and_units_of_a_series_do_not_matter():
    series = np.sin(np.arange(30.0))
    models = tiny_forecaster(0), tiny_forecaster(1)
    one, same, other = (forecast(series, 6, *models, num_samples=5, seed=seed).samples for seed in (1, 1, 2))
    moved = forecast(100 + 5 * series, 6, *models, num_samples=5, seed=1).samples
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    np.testing.assert_allclose(moved, 100 + 5 * one, rtol=1e-3)


def test_a_saved_forecaster_states_the_same_laws(tmp_path):
    model = tiny_forecaster()
    save_forecaster(model, tmp_path / "model")
    again = load_forecaster(tmp_path / "model")
    assert again.shape == TINY
    patches = torch.randn(1, 5, 2)
    with torch.no_grad():
        assert torch.equal(model(patches).mean, again(patches).mean)


@pytest.mark.parametrize("broken", ["nothing", "config", "format", "width", "weights"])
def test_a_folder_without_a_whole_forecaster_is_refused_in_one_line(broken, tmp_path):
    folder = tmp_path / "model"
    if broken != "nothing":
        save_forecaster(tiny_forecaster(), folder)
        config = folder / "config.json"
        text = config.read_text("utf-8")
        changed = {
            "config": "{",
            "format": text.replace("card-forecaster-1", "2"),
            "width": text.replace("16", "24", 1),
        }
        config.write_text(changed.get(broken, text), "utf-8")
        if broken == "weights":
            (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match=r"holds (no|a broken) forecaster") as error:
        load_forecaster(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0], "has 1 of the 4 values"),
        ([2.0] * 40, "constant"),
        ([1.0, math.nan] * 20, "index 1"),
        ([1.0, math.inf] * 20, "index 1"),
        (np.ones((4, 4)), "one dimension"),
        ([*range(8), *[3.0] * 32], "last 20 values are constant"),
    ],
)
def test_a_series_that_cannot_be_forecast_is_refused_in_one_line(values, said):
    with pytest.raises(SettingsError, match=said):
        forecast(values, 12, tiny_forecaster())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"horizon": 0}, "horizon must be a whole number"),
        ({"horizon": 29}, "horizon must be at most 28"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**6}, "at most 10000"),
        ({"num_speculative_patches": 1.5}, "num_speculative_patches"),
        ({"mode": "fast"}, "mode must be one of exact"),
        ({"draft": tiny_forecaster(shape=Shape(patch_size=4, width=16, num_heads=2))}, "one patch size"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(settings, said):
    with pytest.raises(CardError, match=said):
        forecast(np.sin(np.arange(30.0)), **{"horizon": 6, "target": tiny_forecaster(), **settings})


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_a_model_whose_weights_are_no_numbers_is_refused_in_one_line(broken):
    models = {"target": tiny_forecaster(0), "draft": tiny_forecaster(1)}
    torch.nn.init.constant_(models[broken].head.bias, math.nan)
    with pytest.raises(ModelError, match=f"the {broken} states values that are no finite numbers"):
        forecast(np.sin(np.arange(30.0)), 6, **models)
