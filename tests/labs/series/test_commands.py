"""`card train forecaster` and `card forecast`, from a file to a picture, and what is refused."""

from __future__ import annotations

import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import card
from card.cli.main import cli
from card.errors import ModelError
from card.family.learning.checkpoint import Checkpoint
from card.labs.series.forecaster import forecast, load_forecaster, save_forecaster
from card.labs.series.train_forecaster import TrainSettings, train_forecaster
from card.labs.series.transformer import SHAPES, Shape
from card.labs.series.verify import MODES
from card.machine.packages import install_command
from tests.commands import run_command
from tests.labs.series.models import tiny_forecaster

SMALL = Shape(patch_size=4, width=16, num_layers=1, num_heads=2, max_patches=16)


@pytest.fixture
def run(capfd):
    return partial(run_command, capfd)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "waves.csv"
    rows = (f"{step},{math.sin(step / 4) + 0.1 * math.cos(step * step):.5f}" for step in range(200))
    path.write_text("\n".join(("step,wave", *rows)) + "\n", "utf-8")
    return str(path)


@pytest.fixture
def folders(tmp_path):
    for name, seed in (("target", 0), ("draft", 1)):
        save_forecaster(tiny_forecaster(seed), tmp_path / name)
    return "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")


def test_a_forecaster_is_trained_and_forecasts_what_the_python_call_forecasts(run, file, tmp_path):
    out = str(tmp_path / "model")
    ran = run(
        "train", "forecaster", "--series", file, "--column", "wave", "--size", "small", "--steps", "2", "--out", out
    )
    assert (ran.status, ran.err) == (0, "")
    assert "parameters" in ran.out and "nats a value" in ran.out
    asked = "--series", file, "--column", "wave", "--horizon", "10", "--num-samples", "20", "--target", out
    ran = run("forecast", *asked, "--draft", out, "--json")
    found = json.loads(ran.out)
    series = np.loadtxt(file, delimiter=",", skiprows=1)[:, 1]
    model = load_forecaster(out)
    assert model.shape == SHAPES["small"]
    made = forecast(series, 10, model, model, num_samples=20)
    assert found["exact"] is True
    np.testing.assert_allclose(found["mean"], made.mean, rtol=1e-4, atol=1e-4)
    assert found["stats"]["acceptance_rate"] > 0.99


def test_a_forecast_is_printed_and_drawn_and_says_whether_it_is_exact(run, file, folders, tmp_path):
    picture = tmp_path / "pictures" / "wave.png"
    asked = "forecast", "--series", file, "--column", "wave", "--horizon", "6", *folders
    ran = run(*asked, "--plot", str(picture))
    assert (ran.status, ran.err) == (0, "")
    assert "the target's own law" in ran.out and "patches of a continuation in each" in ran.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "exact: false" in run(*asked, "--mode", "adaptive").out


def test_without_matplotlib_the_extra_is_named(run, file, folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    asked = "forecast", "--series", file, "--column", "wave", "--horizon", "6", *folders
    ran = run(*asked, "--plot", str(tmp_path / "wave.png"))
    assert ran.err.endswith(f"a plot needs matplotlib, which is not installed; run {install_command('bench')}\n")


def test_the_command_offers_the_modes_that_there_are():
    option = next(one for one in cli.commands["forecast"].params if one.name == "mode")
    assert tuple(option.type.choices) == MODES


def test_what_cannot_be_is_one_line_and_status_2(run, file, folders, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    learn = "train", "forecaster", "--series", file
    for command, said in (
        (("forecast", "--series", file, *folders), "must have one column of numbers"),
        (("forecast", "--series", file, "--column", "step", *folders, "--horizon", "500"), "horizon must be at most"),
        (("forecast", "--series", file, "--column", "wave", "--target", str(tmp_path)), "holds no forecaster"),
        ((*learn, "--column", "wave", "--out", str(tmp_path / "full")), "is not empty"),
        ((*learn, "--column", "rain", "--out", str(tmp_path / "new")), "no column 'rain'"),
    ):
        ran = run(*command)
        assert ran.status == 2
        assert said in ran.err and ran.err.count("\n") == 1


def test_the_example_of_the_page_runs(folders, tmp_path, monkeypatch):
    page = Path(card.__file__).parent / "labs" / "series" / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    rows = (f"{math.sin(step)},{step}" for step in range(60))
    (tmp_path / "load.csv").write_text("\n".join(("load,step", *rows)), "utf-8")
    monkeypatch.chdir(tmp_path)
    shared: dict[str, Any] = {}
    exec(example.replace("96", "20"), shared)
    assert shared["made"].samples.shape == (100, 20)


def waves() -> np.ndarray:
    steps = np.arange(600)
    return np.sin(steps / 3) + 0.05 * np.random.default_rng(0).normal(size=600)


def test_training_learns_a_wave_and_the_same_seed_gives_the_same_model():
    short, long = (train_forecaster([waves()], SMALL, TrainSettings(steps=steps)) for steps in (2, 150))
    again = train_forecaster([waves()], SMALL, TrainSettings(steps=2))
    assert long.held_out_loss < short.held_out_loss - 0.5
    assert torch.equal(short.model.head.weight, again.model.head.weight)


def test_training_that_was_cut_off_goes_on_to_the_weights_of_one_run(tmp_path):
    settings = TrainSettings(steps=9, checkpoint_steps=3)
    whole = train_forecaster([waves()], SMALL, settings)
    checkpoint = Checkpoint(tmp_path / "training.pt", {})

    def cut_off(step: int) -> None:
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_forecaster([waves()], SMALL, settings, checkpoint=checkpoint, on_step=cut_off)
    told: list[int] = []
    again = train_forecaster([waves()], SMALL, settings, checkpoint=checkpoint, on_step=told.append)
    assert told == [6, 7, 8, 9]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    assert again.held_out_loss == whole.held_out_loss
    with pytest.raises(ModelError, match="of another run: its series"):
        train_forecaster([waves()[:-1]], SMALL, settings, checkpoint=checkpoint)


def test_the_command_goes_on_in_its_own_folder_and_leaves_a_forecaster_there(run, file, tmp_path, monkeypatch):
    out = tmp_path / "model"
    asked = "train", "forecaster", "--series", file, "--column", "wave", "--size", "small", "--steps", "52"

    def cut_off(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("card.labs.series.command.save_forecaster", cut_off)
        assert run(*asked, "--out", str(out)).status == 130
    assert [path.name for path in out.iterdir()] == ["training.pt"]
    assert run(*asked, "--out", str(out)).status == 0
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
