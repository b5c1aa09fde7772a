"""Angles that files scale are those of the folders that they were made of; what is none of them is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from card.backends.transformers.loading import load_model
from card.errors import ModelError
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.gguf_files import write_gguf

TEXT = list(range(3, 60))  # longer than the first context of the tiny models
_FACTOR = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


def logits(model: Any) -> torch.Tensor:
    runner = plain_runner(model, max_model_len=64)
    return torch.from_numpy(runner.forward([Extension(runner.open(), TEXT, range(-1, len(TEXT) - 1))])[0])


def with_angles(folder: Path, made: Path, rope: dict[str, Any]) -> Path:
    """Return a folder like another one, whose angles have other settings."""
    shutil.copytree(folder, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "rope_parameters": config["rope_parameters"] | rope}))
    return made


@pytest.mark.parametrize("kind", ["llama, yarn", "qwen3, yarn", "phi3, longrope", "phi3, longrope in part"])
@pytest.mark.parametrize("length", [20, len(TEXT)])
def test_texts_beyond_the_first_context_are_those_of_transformers(folders, tmp_path, kind, length):
    own = load_decoder(write_gguf(folders(kind), tmp_path / "model.gguf"), cache_dir="")
    runner, ids = plain_runner(own, max_model_len=64), TEXT[:length]
    slot = runner.open()
    assert runner.switch_len == (32 if "longrope" in kind else None)
    if runner.switch_len is not None and length > runner.switch_len:
        runner.make_long(slot)
    (found,) = runner.forward([Extension(slot, ids, range(-1, length - 1))])
    with torch.no_grad():
        expected = load_model(folders(kind))(torch.tensor([ids])).logits[0].numpy()
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("stated", "rope"),
    [
        ({}, {}),
        ({"rope.scaling.yarn_ext_factor": 1.0}, {}),
        (
            {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
            {"beta_fast": 8.0, "beta_slow": 2.0},
        ),
        ({"rope.scaling.yarn_attn_factor": 0.5}, {"attention_factor": 0.5}),
        ({"rope.scaling.yarn_attn_factor": 1.1386294361119891}, {}),  # what follows from the factor
        ({"rope.scaling.yarn_log_multiplier": 0.5}, {"mscale": 1.0, "mscale_all_dim": 0.5}),
        ({"rope.scaling.yarn_log_multiplier": 0.0}, {}),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
    ],
)
def test_each_entry_of_yarn_is_the_field_that_it_was_written_from(folders, tmp_path, stated, rope):
    file = write_gguf(folders("qwen2"), tmp_path / "model.gguf", metadata={**_FACTOR, **stated})
    first = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    same = folders("qwen2") if rope is None else with_angles(folders("qwen2"), tmp_path / "same", {**first, **rope})
    assert torch.equal(logits(load_decoder(file, cache_dir="")), logits(load_decoder(same)))


def test_the_first_context_is_the_whole_one_where_none_is_stated(folders, tmp_path):
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    file = write_gguf(folders("qwen2"), tmp_path / "model.gguf", metadata=metadata)
    found = load_decoder(file, cache_dir="").config.rope_parameters
    assert (found["rope_type"], found["original_max_position_embeddings"]) == ("yarn", 512)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("qwen2", {"metadata": {**_FACTOR, "rope.scaling.yarn_ext_factor": 0.5}}, "scales its angles by yarn in part"),
        ("qwen2", {"metadata": {**_FACTOR, "rope.scaling.factor": -4.0}}, "its qwen2.rope.scaling.factor is -4.0"),
        ("qwen2", {"metadata": {**_FACTOR, "rope.scaling.yarn_beta_fast": -1.0}}, "yarn_beta_fast is -1.0"),
        ("qwen2", {"metadata": {**_FACTOR, "rope.scaling.original_context_length": 0}}, "original_context_length is 0"),
        ("qwen2", {"metadata": {**_FACTOR, "rope.scaling.attn_factor": 1.2}}, "scales its angles by yarn, which"),
        ("qwen2", {"metadata": {"rope.scaling.attn_factor": 1.2}}, "scales its angles by linear, which is not read"),
        ("qwen2", {"metadata": {"rope.scaling.type": "longrope"}}, "scales its angles by longrope, which is not read"),
        ("qwen2", {"metadata": {"rope.freq_base": 1e-30}}, "its qwen2.rope.freq_base is 1"),
        ("qwen2", {"metadata": {**_FACTOR, "rope.scaling.factor": 1e-30}}, "its qwen2.rope.scaling.factor is 1"),
        ("phi3, longrope", {"metadata": {"rope.scaling.original_context_length": 1}}, "original_context_length is 1"),
        ("llama, longer", {"metadata": _FACTOR}, "scales its angles twice, by rope.scaling.factor and by rope_freqs"),
        ("phi3, longrope", {"without": ("rope_factors_long.weight",)}, "tensor rope_factors_long.weight is missing"),
        ("phi3, longrope", {"metadata": {"rope.scaling.attn_factor": 0.0}}, "its phi3.rope.scaling.attn_factor is 0.0"),
        ("phi3, longrope", {"metadata": {"rope.dimension_count": 12}}, "has 8 factors in rope_factors_short.weight"),
    ],
)
def test_angles_that_are_not_known_are_refused(folders, tmp_path, kind, options, said):
    with pytest.raises(ModelError) as caught:
        load_decoder(write_gguf(folders(kind), tmp_path / "model.gguf", **options), cache_dir="")
    assert said in str(caught.value) and "\n" not in str(caught.value)
