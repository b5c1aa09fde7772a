"""The benchmark for GPUs refuses to run without one; its rows run on the CPU here, on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from card.errors import SettingsError
from card.tools.bench.environment import describe_run
from tests.pair import Pair


@pytest.fixture(scope="module")
def gpu(bench: dict[str, ModuleType]) -> ModuleType:
    return bench["gpu"]


@pytest.fixture(scope="module")
def options(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "prompts.jsonl").write_text(json.dumps({"question": "How many?"}) + "\n")
    models = ["--target", pair.target, "--draft", pair.draft, "--draft-cost", "60K", "--target-costs", "100K"]
    return ["--prompts", str(folder / "prompts.jsonl"), "--limit", "1", "--out", str(folder / "out.jsonl"), *models]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_it_refuses_to_run_without_a_gpu_and_says_what_to_do(gpu: ModuleType, options: list[str]) -> None:
    with pytest.raises(SettingsError, match=r"needs a CUDA device.*card bench"):
        gpu.main(options)
    assert not Path(options[options.index("--out") + 1]).exists()


def test_every_row_writes_the_text_of_plain_decoding(gpu: ModuleType, options: list[str]) -> None:
    settings = ["--device", "cpu", "--dtype", "float32", "--max-tokens", "12", "--repeats", "1", "--sps-lengths", "2,3"]
    args = gpu.parse_arguments([*options, *settings])
    run = gpu.run_pairs(args, describe_run(), Console(quiet=True))
    assert [row.name for row in run.rows] == list(gpu.ROWS) and run.status == "complete"
    assert {(check.row, check.num_equal) for check in run.checks} == {(name, 1) for name in gpu.ROWS}
    (pair,) = run.pairs
    assert pair.name == "target@100K+draft@60K"
    assert pair.target_cost is not None and "inflated" in pair.target_cost and "inflated" in str(pair.draft)
    settings = {one.row: one.settings for one in run.chosen}
    assert settings["card-tree"]["placement"] == "thread" and settings["card-tree"]["verify"] == "tree"
    assert set(settings["sps"]["chosen_among"]) == {"2", "3"}


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (["--methods", "magic"], "unknown method"),
        (["--dtype", "auto"], "--dtype"),
        (["--target-costs", "8X"], "number of parameters"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    gpu: ModuleType, options: list[str], wrong: list[str], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        gpu.parse_arguments([*options, *wrong])


def test_models_that_do_not_fit_are_refused_before_they_are_made(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * 10**9, 80 * 10**9))
    gpu.check_memory("cuda:0", "bfloat16", ["8B", "1B"])
    with pytest.raises(SettingsError, match=r"30B and 1B parameters take about 74 GB in bfloat16.*70 GB free"):
        gpu.check_memory("cuda:0", "bfloat16", ["30B", "1B"])
