"""Weights that are mapped from a file: a file that changes or becomes shorter ends a request, never the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.models.demo import demo_folder
from card.models.files.mapped_weights import MappedWeights
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(
    REASON is not None or sys.platform != "linux", reason=str(REASON or "bus errors look otherwise than on Linux")
)
CHANGED = r"model.safetensors changed while its weights were in use; start again once it is complete$"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder("draft"), tmp_path / "model"))


def run(runner: RowRunner, slot: int) -> torch.Tensor:
    first = runner.num_rows(slot)
    return torch.from_numpy(runner.forward([Extension(slot, [5, 900], [first - 1, first])])[0])


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_pass_on_weights_that_were_cut_off_fails_in_one_line(folder: Path, dtype: str) -> None:
    runner = plain_runner(load_decoder(folder, dtype=dtype), max_model_len=64)
    slot = runner.open()
    run(runner, slot)
    os.truncate(folder / "model.safetensors", 100)
    for _ in range(2):
        with pytest.raises(ModelError, match=CHANGED):
            run(runner, slot)
    assert runner.num_rows(slot) == 2


def test_a_pass_on_weights_that_were_written_over_fails_in_one_line(folder: Path) -> None:
    runner = plain_runner(load_decoder(folder), max_model_len=64)
    slot = runner.open()
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(-100, os.SEEK_END)
        stream.write(bytes(100))
    os.utime(folder / "model.safetensors")
    with pytest.raises(ModelError, match=CHANGED):
        run(runner, slot)


def test_weights_that_are_cut_off_before_they_are_packed_fail_in_one_line(folder: Path) -> None:
    model = load_decoder(folder)
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(ModelError, match=CHANGED):
        plain_runner(model, max_model_len=64)


def test_a_folder_that_is_removed_or_widened_is_not_asked_again(folder: Path) -> None:
    runners = [plain_runner(load_decoder(folder, dtype=dtype), max_model_len=64) for dtype in ("auto", "float32")]
    slots = [runner.open() for runner in runners]
    expected = [run(runner, slot) for runner, slot in zip(runners, slots, strict=True)]
    for runner, slot in zip(runners, slots, strict=True):
        runner.keep(slot, 0)
    shutil.rmtree(folder)
    for runner, slot, logits in zip(runners, slots, expected, strict=True):
        assert torch.equal(run(runner, slot), logits)


def test_what_a_file_has_lost_is_zeros_and_the_rest_stays(tmp_path: Path) -> None:
    file, half = tmp_path / "w.safetensors", 4 << 20
    save_file({"weight": torch.arange(1, half // 2 + 1, dtype=torch.float32)}, file)
    weights = MappedWeights(file)
    other = MappedWeights(file)
    os.truncate(file, half // 2)
    kept = half // 2 // 4 - 4096
    assert np.array_equal(weights.arrays["weight"][:kept], np.arange(1, kept + 1, dtype=np.float32))
    assert weights.arrays["weight"][kept + 8192 :].sum() == 0
    for one in (weights, other):
        with pytest.raises(ModelError, match="changed while its weights were in use"):
            one.check()


def test_a_bus_error_elsewhere_still_ends_the_process(tmp_path: Path) -> None:
    code = (
        "import mmap, sys; from pathlib import Path; from card.models.files.mapped_weights import MappedWeights\n"
        "import torch; from safetensors.torch import save_file\n"
        "file = Path(sys.argv[1]) / 'w.safetensors'; save_file({'weight': torch.zeros(9999)}, file)\n"
        "weights, stream = MappedWeights(file), (file.parent / 'other').open('w+b')\n"
        "stream.truncate(9999); other = mmap.mmap(stream.fileno(), 0); stream.truncate(0)\n"
        "print('before', flush=True); print(other[5000])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("before", -7)
