"""Forecasters are read from folders of transformers, too; whatever else a folder holds is refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from card.errors import ModelError, SettingsError
from card.labs.series.decoding import PatchModel
from card.labs.series.forecaster import forecast
from card.labs.series.hf import TimeSeriesModel
from card.labs.series.loading import open_forecaster
from card.labs.series.timesfm import TimesFmForecaster
from tests.commands import run_command
from tests.labs.series.test_hf import tiny_model
from tests.labs.series.test_timesfm import tiny_new, tiny_old

SERIES = np.sin(np.arange(60) / 3)
KINDS = {
    "time_series_transformer": (tiny_model, TimeSeriesModel),
    "timesfm": (tiny_old, TimesFmForecaster),
    "timesfm2_5": (tiny_new, TimesFmForecaster),
}


def samples(model: PatchModel) -> np.ndarray:
    return forecast(SERIES, 4, model, num_samples=3).samples


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_forecasts_as_its_model_does(kind: str, tmp_path: Path) -> None:
    make, wrap = KINDS[kind]
    make(1).save_pretrained(tmp_path)
    np.testing.assert_allclose(samples(open_forecaster(tmp_path)), samples(wrap(make(1))), rtol=1e-5)


def test_the_command_takes_such_a_folder_as_target_and_as_draft(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, seed in (("target", 1), ("draft", 2)):
        tiny_old(seed).save_pretrained(tmp_path / name)
    rows = (f"{step},{math.sin(step / 4):.5f}" for step in range(60))
    (tmp_path / "waves.csv").write_text("\n".join(("step,wave", *rows)) + "\n", "utf-8")
    asked = ("--series", str(tmp_path / "waves.csv"), "--column", "wave", "--horizon", "8", "--num-samples", "5")
    models = ("--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"))
    ran = run_command(capfd, "forecast", *asked, *models, "--json")
    found = json.loads(ran.out)
    assert (ran.status, ran.err) == (0, "") and found["exact"] and found["stats"]["num_checked"] > 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"model_type": "llama"},
            ModelError,
            "of type llama; a forecaster is one of card train forecaster, or of type",
        ),
        ({"distribution_output": "negative_binomial"}, SettingsError, "must have normal outputs"),
        ({"d_model": 8}, ModelError, "cannot be read"),
    ],
)
def test_other_models_are_refused(
    change: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    tiny_model().save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(facts | change), "utf-8")
    with pytest.raises(error, match=words):
        open_forecaster(tmp_path)


def test_missing_weights_are_refused_and_not_made_up(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.popitem()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="1 tensors are missing, the first is"):
        open_forecaster(tmp_path)
