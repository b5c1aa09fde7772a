"""Facts that the files of models state."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from card.models.files.file_facts import file_facts
from tests.hostile_headers import LLAMA, U32, entry, write

GIVEN = 1_700_000_000.0


@pytest.mark.parametrize(
    ("number", "named"),
    [(15, "Q4_K_M"), (7, "Q8_0"), (32, "BF16"), (38, "MXFP4_MOE"), (5, "unknown"), (None, "unknown")],
)
def test_a_gguf_file_tells_its_family_its_mixture_and_its_size(number: int | None, named: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    kind = [] if number is None else [entry("general.file_type", U32, struct.pack("<I", number))]
    write(file, entries=[LLAMA, *kind], tensors=[])
    os.utime(file, (GIVEN, GIVEN))
    facts = file_facts(str(file))
    assert facts is not None
    assert (facts.form, facts.family, facts.quantization) == ("gguf", "llama", named)
    assert (facts.num_bytes, facts.modified_at, len(facts.digest)) == (file.stat().st_size, GIVEN, 64)


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({"dtype": "bfloat16"}, "BF16"),
        ({"text_config": {"torch_dtype": "float16"}}, "F16"),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}, "MXFP4"),
        ({}, "unknown"),
    ],
)
def test_a_folder_tells_its_type_and_the_numbers_it_holds(config: Any, stored: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}), "utf-8")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    first = file_facts(str(tmp_path))
    assert first is not None and (first.form, first.family, first.quantization) == ("safetensors", "qwen3", stored)
    assert first.num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    weights.write_bytes(bytes((3 << 20) - 1) + b"1")  # other weights of the same size
    file_facts.cache_clear()
    second = file_facts(str(tmp_path))
    assert second is not None and second.digest != first.digest
    assert dataclasses.replace(second, digest=first.digest, modified_at=first.modified_at) == first


def test_a_model_of_the_hub_tells_of_the_files_that_were_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "q.gguf", entries=[LLAMA], tensors=[])
    fetched = {("org/name", "q.gguf"): str(file)}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place: fetched.get(place))
    assert file_facts("org/name") is None
    there = file_facts("org/name/q.gguf")
    assert there is not None and there.family == "llama"
    file_facts.cache_clear()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', "utf-8")
    fetched["org/name", "config.json"] = str(tmp_path / "config.json")
    folder = file_facts("org/name")
    assert folder is not None and folder.family == "qwen3"
