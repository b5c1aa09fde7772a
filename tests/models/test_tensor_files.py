"""Safetensors files: written as safetensors itself does, mapped as they are, and refused if they cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from card.backends.transformers.arrays import as_array, as_tensor
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
    "brain": torch.randn(7).bfloat16(),
    "größe": torch.zeros(1, dtype=torch.int32),
}


def arrays() -> dict[str, Any]:
    """Return the tensors as arrays, in whatever order their numbers lie."""
    return {
        name: as_array(tensor, keeps_bits=True) if tensor.dtype == torch.bfloat16 else tensor.numpy()
        for name, tensor in TENSORS.items()
    }


def test_a_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    facts = {"said": 'in "ä" words'}
    write_tensors(tmp_path / "ours", arrays(), facts)
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs", facts)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


def test_what_is_mapped_is_what_safetensors_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", arrays(), {"format": "x"})
    mapped, read = MappedTensors(tmp_path / "file"), load_file(tmp_path / "file")
    assert mapped.facts == {"format": "x"} and mapped.arrays.keys() == read.keys()
    for name, tensor in read.items():
        found = as_tensor(mapped.arrays[name])
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_floats_of_8_bits_are_written_and_mapped_too(tmp_path: Path) -> None:
    tensors = {kind: torch.randn(5).to(getattr(torch, kind)) for kind in ("float8_e4m3fn", "float8_e5m2")}
    made = {kind: one.view(torch.uint8).numpy().view(getattr(ml_dtypes, kind)) for kind, one in tensors.items()}
    write_tensors(tmp_path / "ours", made)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for kind, array in MappedTensors(tmp_path / "theirs").arrays.items():
        assert array.dtype == made[kind].dtype and array.tobytes() == made[kind].tobytes()


def test_tensors_can_be_written_to_their_places_in_any_order(tmp_path: Path) -> None:
    kinds = {"a": (np.dtype(np.float32), (2,)), "b": (np.dtype(np.uint8), (3,))}
    with tensors_written(tmp_path / "file", kinds) as (stream, places):
        assert places["a"] % 64 == 0
        os.pwrite(stream.fileno(), b"\x01\x02\x03", places["b"])
        os.pwrite(stream.fileno(), np.array([0.5, 2.0], np.float32).tobytes(), places["a"])
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
