"""Generation configs say what transformers reads in them, from their own file or from a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from card.models.facts import sampling_defaults
from card.models.files.generation_config import read_generation_config

LLAMA = {"model_type": "llama", "vocab_size": 8, "eos_token_id": 2}
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "a file of its own": {
        "config.json": {**LLAMA, "temperature": 0.1},
        "generation_config.json": {"eos_token_id": [1, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9},
    },
    "a file that states nothing": {"config.json": LLAMA, "generation_config.json": {"transformers_version": "4.1"}},
    "values that are null": {"config.json": LLAMA, "generation_config.json": {"eos_token_id": None, "top_k": None}},
    "a bound and a penalty": {
        "config.json": LLAMA,
        "generation_config.json": {"max_new_tokens": 7, "repetition_penalty": 1.1, "do_sample": False, "min_p": 0.1},
    },
    "an older config": {"config.json": {**LLAMA, "do_sample": True, "top_k": 20, "temperature": 0.7}},
    "a config that states nothing": {"config.json": {"model_type": "llama", "eos_token_id": None}},
}


@pytest.mark.parametrize("name", FILES)
def test_a_folder_states_what_transformers_reads_in_it(tmp_path: Path, name: str) -> None:
    for file, content in FILES[name].items():
        (tmp_path / file).write_text(json.dumps(content))
    if "generation_config.json" in FILES[name]:
        theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    else:
        theirs = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(tmp_path))
    own = read_generation_config(tmp_path)
    assert own.eos_token_id == theirs.eos_token_id
    facts = [sampling_defaults(SimpleNamespace(generation_config=one)) for one in (own, theirs)]  # type: ignore[arg-type]
    assert facts[0] == facts[1]


def test_what_only_the_text_model_inside_states_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None, "text_config": {"eos_token_id": 3}}))
    assert read_generation_config(tmp_path).eos_token_id == 3


@pytest.mark.parametrize("content", ["[1]", "{not json", "3"])
def test_a_file_that_is_no_object_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"JSON|property name"):
        read_generation_config(tmp_path)
