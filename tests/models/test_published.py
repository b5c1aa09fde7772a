"""Folders with configs as makers publish them load, the quick way where it is built, and write transformers' text."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from card.models.architectures import Architecture, all_architectures, find_architecture
from card.models.decoder_config import ConfigRule
from card.models.facts import context_limit, end_token_ids
from card.models.loading import load_decoder
from card.models.own.decoder_model import read_decoder
from card.models.own.plain_config import read_config
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.every_family import script
from tests.models.published import CONFIGS, VOCAB, save_published

PROMPT = [3, 17, 99, 4, 56, 21, 8]
NUM_TOKENS = 24
DEFAULTS: Any = script("make_config_defaults")


def greedy(model: Any, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return the tokens that follow the prompt, up to one that ends the text."""
    runner = plain_runner(model, max_model_len=64)
    slot, ends = runner.open(), end_token_ids(model)
    token_ids, first = list(PROMPT), 0
    while len(token_ids) < len(PROMPT) + num_tokens and not ends.intersection(token_ids[len(PROMPT) :]):
        new = token_ids[first:]
        logits = runner.forward([Extension(slot, new, range(first - 1, first + len(new) - 1), len(new) - 1)])[0]
        first = len(token_ids)
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(PROMPT) :]


def generated(folder: Path, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return what transformers' generate writes."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=num_tokens, do_sample=False)
    return list(out[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_gives_the_tokens_of_generate(tmp_path: Path, name: str):
    save_published(tmp_path, name)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    model = load_decoder(tmp_path)
    assert (read_decoder(tmp_path, dtype="auto") is not None) == CONFIGS[name][1]
    assert context_limit(model) == theirs.max_position_embeddings
    assert model.config.eos_token_id == theirs.eos_token_id
    assert greedy(model) == generated(tmp_path)


@pytest.mark.parametrize("name", [name for name, (_, is_quick) in CONFIGS.items() if is_quick])
def test_every_field_is_read_as_by_the_own_class_of_the_config(tmp_path: Path, name: str):
    save_published(tmp_path, name)
    ours, theirs = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours is not None
    stated = {field: value for field, value in theirs.to_dict().items() if not field.startswith("_")}
    known = {field: value for field, value in stated.items() if field not in DEFAULTS.OF_NO_DECODER}
    if theirs.model_type.startswith("qwen"):
        known.pop("layer_types", None)  # written out there for each layer; all are full
    if known.get("head_dim", ...) is None:
        known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]  # written out here
    assert {field: getattr(ours, field, ...) for field in known} == known


@pytest.mark.parametrize("entry", all_architectures(), ids=lambda entry: entry.model_class)
def test_fields_that_are_missing_have_the_values_of_the_own_class(entry: Architecture):
    ours, own = entry.config_fields, CONFIG_MAPPING[entry.model_type]
    for field in fields(own):
        if field.name not in DEFAULTS.OF_NO_DECODER:
            assert ours.defaults[field.name] == field.default, field.name
            assert field.name in ours.types
    assert ours.theta == own.default_theta


def test_the_table_of_defaults_is_what_its_script_makes():
    assert DEFAULTS.TABLE.read_text("utf-8") == DEFAULTS.text_of(DEFAULTS.table())


def test_a_default_of_an_entry_stands_in_place_of_that_of_the_table():
    entry = find_architecture("seed_oss")
    assert entry is not None
    other = replace(entry, config=ConfigRule(defaults={"attention_bias": False, "rope_theta": 5.0, "of_its_own": None}))
    config = other.make_config(num_hidden_layers=3)
    assert (config.attention_bias, config.of_its_own, config.hidden_size) == (False, None, 4096)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5.0}
    with pytest.raises(TypeError, match="its attention_bias is 7, it must be of type bool"):
        other.make_config(attention_bias=7)


def test_the_end_is_read_from_the_generation_config_where_the_config_has_none(tmp_path: Path):
    save_published(tmp_path, "Qwen2.5, without eos_token_id")
    end = generated(tmp_path)[5]
    save_published(tmp_path, "Qwen2.5, without eos_token_id", {"eos_token_id": [end, VOCAB - 1], "do_sample": False})
    tokens = greedy(load_decoder(tmp_path))
    assert tokens == generated(tmp_path)
    assert len(tokens) <= 6
    assert tokens[-1] in (end, VOCAB - 1)


@pytest.mark.parametrize(
    ("of_config", "of_generation"),
    [([1, 106], [106]), (32000, [32001, 32007]), (2, None), (None, [9])],
    ids=["as Gemma", "as Phi-3", "config alone", "generation config alone"],
)
def test_a_text_ends_where_that_of_generate_ends(
    tmp_path: Path, of_config: int | list[int] | None, of_generation: list[int] | None
):
    save_published(tmp_path, "Llama 3")
    free = generated(tmp_path)
    small = sorted({1, 2, 9, 106, 32000, 32001, 32007})
    stands_for = dict(zip(small, free[2:], strict=False))  # ids that this model writes, in the places of those

    def mapped(ids: int | list[int] | None) -> int | list[int] | None:
        return [stands_for[one] for one in ids] if isinstance(ids, list) else stands_for.get(ids or 0)

    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": mapped(of_config)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if of_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": mapped(of_generation)}))
    tokens = greedy(load_decoder(tmp_path))
    assert tokens == generated(tmp_path)
    assert len(tokens) < NUM_TOKENS
