"""One table says what models are made of, and whoever runs or reads a model follows it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import pytest

import card.models
from card.models.architectures import Architecture, all_architectures, find_architecture
from card.models.decoder_config import ConfigFields, ConfigRule
from card.models.gguf_map import GgufMap
from card.models.layer_shape import ExpertRule
from card.models.parts import Part
from tests.models.published import CONFIGS

PACKAGE = Path(card.models.__file__).parent
FOLLOWERS = [
    *(PACKAGE / "own" / f"{name}.py" for name in ("decoder_model", "reasons", "exact_decoder", "layer_tables")),
    *(PACKAGE / "own" / f"{name}.py" for name in ("expert_weights", "mxfp4_experts", "plain_config")),
    *(PACKAGE.parent / "backends" / name for name in ("transformers/walking.py", "cuda/fused.py")),
    *sorted(PACKAGE.glob("files/gguf/*.py")),
]
RECORDS = ("architectures/architecture", "decoder_config", "layer_shape", "gguf_map", "parts")
TABLE = [PACKAGE / f"{name}.py" for name in RECORDS]
NO_PARTS = frozenset({"MADV_DONTNEED", "_hf_hook"})  # of the system, and of accelerate


def _guesses(source: str) -> list[str]:
    """Return where a module asks what a model is instead of reading its entry."""
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node)
        if isinstance(node, ast.Compare) and ("model_type" in text or "model_class" in text):
            found.append(text)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
            name = node.args[1]
            if not (isinstance(name, ast.Constant) and name.value in NO_PARTS):
                found.append(text)
    return found


def test_no_pass_and_no_reader_asks_a_model_what_it_is() -> None:
    assert sorted(guess for path in FOLLOWERS for guess in _guesses(path.read_text("utf-8"))) == [
        "kind.__name__ == entry.model_class",  # whether an entry is that of a model at all
        "raw.get('architectures') != [architecture.model_class]",
    ]


def test_a_question_to_a_model_is_found() -> None:
    for guess in ('config.model_type == "qwen3"', 'config["model_type"] in ("llama",)', 'hasattr(layer, "q_norm")'):
        assert _guesses(f"if {guess}:\n    pass") == [ast.unparse(ast.parse(guess))]


def test_every_field_of_the_table_is_read() -> None:
    trees = [ast.parse(path.read_text("utf-8")) for path in (*FOLLOWERS, *TABLE)]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    kinds = (Architecture, Part, ConfigRule, ConfigFields, ExpertRule, GgufMap)
    assert {field.name for kind in kinds for field in fields(kind)} - read == set()


def test_an_entry_is_found_by_what_its_config_says_and_by_nothing_else() -> None:
    entries = all_architectures()
    assert [find_architecture(entry.model_type) for entry in entries] == entries
    assert [find_architecture(name) for name in ("architecture", "gpt2", "", None, ["llama"], {})] == [None] * 6


def test_every_entry_is_compared_with_transformers_by_a_published_config() -> None:
    published = {config["architectures"][0] for config, is_quick in CONFIGS.values() if is_quick}
    assert published == {entry.model_class for entry in all_architectures()}


def test_the_fields_that_an_entry_names_are_those_of_its_config() -> None:
    for entry in all_architectures():
        stated = [*entry.scales.values(), *entry.biases.values(), *entry.caps.values(), entry.activation]
        named = {one for one in stated if isinstance(one, str)}
        assert named <= entry.config_fields.defaults.keys(), entry.model_class


def test_parts_are_called_as_llama_cpp_calls_them() -> None:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    named = unnamed = 0
    for entry in all_architectures():
        kind = kinds[entry.gguf.name or "llama"]
        held = {gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[kind]}
        names = gguf.get_tensor_name_map(kind, 1)
        for part in entry.in_files.parts:
            found = names.get_name(f"model.layers.0.{part.name.replace('{}.', '')}", try_suffixes=(".weight", ".bias"))
            endings = ("", ".weight", ".bias", ".scale")
            if found is None:  # a name that llama.cpp's converter changes first
                unnamed += 1
            else:
                named += 1
                assert f"blk.0.{part.gguf_name}" in {f"{found}{end}" for end in endings}, (entry.model_class, part.name)
                assert f"blk.{{bid}}.{part.gguf_name}" in {f"{one}{end}" for one in held for end in endings}
    assert named > 8 * unnamed


def test_numbers_of_experts_have_keys_of_llama_cpp() -> None:
    known = {key for of in vars(gguf.Keys).values() if isinstance(of, type) for key in vars(of).values()}
    for entry in all_architectures():
        for key in {**entry.gguf_experts, **entry.gguf_numbers}.values():
            assert f"{{arch}}.{key}" in known, (entry.model_class, key)


@pytest.mark.parametrize(
    ("model_type", "field", "value", "words"),
    [
        ("olmoe", "clip_qkv", 0.0, "its queries, keys and values are clipped (clip_qkv)"),
        ("lfm2", "conv_bias", True, "its convolutions have biases (conv_bias)"),
        ("ernie4_5_moe", "use_bias", True, "its layers have biases (use_bias)"),
    ],
)
def test_a_config_that_asks_for_what_is_not_built_is_refused_by_the_field(
    model_type: str, field: str, value: Any, words: str
) -> None:
    entry = find_architecture(model_type)
    assert entry is not None and entry.refusal(entry.make_config()) is None
    assert entry.refusal(entry.make_config(**{field: value})) == words
