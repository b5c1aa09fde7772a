"""The benchmark for GPUs refuses to run without one; its rows run on the CPU here, on a tiny pair."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from card.errors import SettingsError
from tests.benchmarks.test_methods import BENCHMARKS, MODULES, make_pair


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("gpu")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in {"gpu", *MODULES} - before:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = make_pair(folder)
    (folder / "prompts.jsonl").write_text(json.dumps({"question": "How many?", "answer": "2"}) + "\n")
    models = ["--target", str(target), "--draft", str(draft), "--draft-cost", "60K", "--target-costs", "100K"]
    return ["--prompts", str(folder / "prompts.jsonl"), "--limit", "1", "--out", str(folder / "out.jsonl"), *models]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_it_refuses_to_run_without_a_gpu_and_says_what_to_do(gpu: ModuleType, options: list[str]) -> None:
    with pytest.raises(SettingsError, match=r"needs a CUDA device.*benchmarks/methods\.py"):
        gpu.main(options)
    assert not Path(options[options.index("--out") + 1]).exists()


def test_every_row_writes_the_text_of_plain_decoding(gpu: ModuleType, options: list[str]) -> None:
    settings = ["--device", "cpu", "--dtype", "float32", "--max-tokens", "12", "--repeats", "1", "--sps-lengths", "2,3"]
    args = gpu.parse_arguments([*options, *settings])
    lines = gpu.run_target(args, args.target_costs[0], {}, Console(quiet=True))
    assert [line["method"] for line in lines] == list(gpu.ROWS)
    for line in lines:
        assert line["outputs_equal"] is True
        assert line["decode_tokens_per_s"] > 0
        assert "inflated" in line["target_cost"] and "inflated" in line["draft_cost"]
        assert line["devices"] == {"target": "cpu", "draft": "cpu"}
    by_name = {line["method"]: line for line in lines}
    assert by_name["card-tree"]["settings"]["placement"] == "thread"
    assert by_name["card-tree"]["settings"]["verify"] == "tree"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (["--methods", "magic"], "unknown method"),
        (["--dtype", "auto"], "--dtype"),
        (["--target-costs", "8X"], "parameter count"),
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
