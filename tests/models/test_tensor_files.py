"""Safetensors files: written as safetensors itself does, mapped as they are, and refused if they cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from card.models.files.headers import HeaderError
from card.models.files.tensor_files import MappedTensors, tensors_written, write_tensors

TENSORS = {
    "half": torch.randn(3).half(),
    "rows": torch.randn(2, 3),
    "turned": torch.randn(2, 3).T,
    "none": torch.zeros(0, 4),
    "one": torch.tensor(1.5),
    "ids": torch.arange(3),
    "small": torch.tensor([True, False]),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "größe": torch.zeros(1, dtype=torch.int32),
}


def test_a_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    facts = {"said": 'in "ä" words'}
    write_tensors(tmp_path / "ours", TENSORS, facts)
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs", facts)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


def test_what_is_mapped_is_what_safetensors_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", TENSORS, {"format": "x"})
    mapped, read = MappedTensors(tmp_path / "file"), load_file(tmp_path / "file")
    assert mapped.facts == {"format": "x"} and mapped.tensors.keys() == read.keys()
    for name, tensor in read.items():
        assert mapped.tensors[name].dtype == tensor.dtype and mapped.tensors[name].shape == tensor.shape
        assert torch.equal(mapped.tensors[name].float(), tensor.float())


def test_tensors_can_be_written_to_their_places_in_any_order(tmp_path: Path) -> None:
    kinds = {"a": (torch.float32, (2,)), "b": (torch.uint8, (3,))}
    with tensors_written(tmp_path / "file", kinds) as (stream, places):
        assert places["a"] % 64 == 0
        os.pwrite(stream.fileno(), b"\x01\x02\x03", places["b"])
        os.pwrite(stream.fileno(), torch.tensor([0.5, 2.0]).numpy().tobytes(), places["a"])
    assert {name: one.tolist() for name, one in load_file(tmp_path / "file").items()} == {"a": [0.5, 2], "b": [1, 2, 3]}


@pytest.mark.parametrize(
    ("header", "state"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "damaged"),
        ({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, "damaged"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "damaged"),
        ({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, "damaged"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "cut off"),
        (["a"], "damaged"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: Any, state: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(HeaderError) as caught:
        MappedTensors(tmp_path / "file")
    assert caught.value.state == state
