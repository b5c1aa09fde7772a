"""Gemma 4 in the exact pass: shared keys, own numbers of tokens for each layer, keys as values, experts beside MLPs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from card.api.llm import LLM
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import BFLOAT16, Floats
from card.models.files.mapped_weights import MappedWeights
from card.models.loading import load_decoder
from card.models.own.decoder_model import DecoderModel, read_decoder
from card.models.own.layers import BlockWeight
from card.models.protocol import Extension
from card.models.runners import plain_runner
from tests.gguf_files import demo_tokenizer, save_model, write_gguf

pytestmark = pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here")

KINDS = ("gemma4, own inputs", "gemma4, keys as values", "gemma4, experts")
OWN_INPUTS, NO_VALUES, EXPERTS = KINDS
NUM_TOKENS = 60  # a window is 9
_KEYS_AND_VALUES = [f"self_attn.{one}.weight" for one in ("k_proj", "v_proj", "k_norm")]


def own(folder: Path, **options: Any) -> DecoderModel:
    model = load_decoder(str(folder), **options)
    assert type(model) is DecoderModel
    return model


def logits_of(model: Any, token_ids: list[int]) -> Floats:
    runner = plain_runner(model, max_model_len=128)
    (logits,) = runner.forward([Extension.of_text(runner.open(), token_ids, first_logits=0)])
    return np.array(logits)


def rewritten(folder: Path, to: Path, change: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Path:
    """Write a folder again with other fields of its config, and with more tensors."""
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **change}))
    weights = {**load_file(folder / "model.safetensors"), **(more or {})}
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("kind", KINDS)
def test_logits_beyond_a_window_are_those_of_transformers(folders: Callable[[str], Path], kind: str) -> None:
    model, theirs = own(folders(kind)), load_model(folders(kind))
    token_ids = [(7 * i * i + 3 * i) % model.config.vocab_size for i in range(NUM_TOKENS)]
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()
    found = logits_of(model, token_ids)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.array_equal(found, logits_of(theirs, token_ids))  # whose modules are walked


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(folders: Callable[[str], Path], kind: str) -> None:
    prompt = [3, 17, 99, 4, 56, 21, 8]
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folders(kind), dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0].tolist()
    runner = plain_runner(own(folders(kind)), max_model_len=64)
    slot, token_ids, held = runner.open(), list(prompt), 0
    while len(token_ids) < len(expected):
        (logits,) = runner.forward([Extension.of_text(slot, token_ids, held)])
        held = len(token_ids)
        token_ids.append(int(logits[-1].argmax()))
    assert token_ids == expected


def test_a_row_takes_the_keys_of_layers_that_make_some_alone(folders: Callable[[str], Path]) -> None:
    runner = plain_runner(own(folders(OWN_INPUTS)), max_model_len=64)
    windows, full = 2 * (2 * 2 * 32), 2 * 2 * 64  # of six layers the last three share those of the first
    assert runner.row_bytes == 4 * (windows + full)
    runner = plain_runner(own(folders(NO_VALUES)), max_model_len=64)
    assert runner.row_bytes == 4 * (4 * (2 * 2 * 32) + 2 * (2 * 1 * 64))


@pytest.mark.parametrize(("stored", "asked"), [("bfloat16", "auto"), ("bfloat16", "float32"), ("float32", "int8")])
def test_the_table_of_own_numbers_stays_in_its_file(
    folders: Callable[[str], Path], tmp_path: Path, stored: str, asked: str
) -> None:
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folders(OWN_INPUTS), dtype=getattr(torch, stored))
    theirs.save_pretrained(tmp_path)
    model = read_decoder(tmp_path, dtype="auto" if asked == "int8" else asked)
    assert model is not None and model.layer_inputs is not None
    model.computes_int8 = asked == "int8"
    logits_of(model, [5, 6, 7])
    table = model.layer_inputs.table
    assert table.dtype == (BFLOAT16 if stored == "bfloat16" else np.float32)
    assert any(np.shares_memory(table, one) for pages in model.pages for one in pages.arrays.values())


def test_a_file_of_blocks_has_the_table_as_rows_of_the_kept_file(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_gguf(folders(OWN_INPUTS), tmp_path / "model.gguf", kind=Kind.Q4_0)
    model = own(file, cache_dir=str(tmp_path))
    assert model.layer_inputs is not None
    table, (pages,) = model.layer_inputs.table, model.pages
    assert isinstance(table, BlockWeight) and isinstance(pages, MappedWeights)
    assert table.nbytes == table.size * 18 // 32  # no panels beside them
    assert any(np.shares_memory(table.data, one) for one in pages.arrays.values())


def test_keys_of_layers_that_share_others_are_left_out(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model = own(folders(OWN_INPUTS))
    its = {name: weight for name, weight in model.weights if isinstance(weight, np.ndarray)}
    more = {
        f"model.layers.{3 + idx}.{name}": np.array(its[f"model.layers.{idx}.{name}"])
        for idx in range(3)
        for name in _KEYS_AND_VALUES
    }
    assert not more.keys() & its.keys()
    found = own(rewritten(folders(OWN_INPUTS), tmp_path, {}, more))
    assert {name for name, _ in found.weights} == its.keys()
    assert np.array_equal(logits_of(found, [5, 6, 7]), logits_of(model, [5, 6, 7]))


def test_a_config_as_published_states_the_sizes_of_full_layers_by_fields_of_their_own(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    published = {"global_head_dim": 64, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    raw = json.loads((folders(NO_VALUES) / "config.json").read_text())
    assert raw["per_layer_config"] == {one: {"head_dim": 64, "num_key_value_heads": 1} for one in "25"}
    to = rewritten(folders(NO_VALUES), tmp_path, published)
    stated = json.loads((to / "config.json").read_text())
    del stated["per_layer_config"]
    (to / "config.json").write_text(json.dumps(stated))
    assert np.array_equal(logits_of(own(to), [5, 6, 7]), logits_of(own(folders(NO_VALUES)), [5, 6, 7]))


@pytest.mark.parametrize("kind", [OWN_INPUTS, EXPERTS])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_texts_of_trees_are_those_of_plain_decoding(
    folders: Callable[[str], Path], tmp_path: Path, kind: str, dtype: str
) -> None:
    save_model(tmp_path, kind, demo_tokenizer(), noise=0.03)
    many = [SamplingParams(temperature=temperature, seed=5, max_tokens=40) for temperature in (0.0, 1.0)]
    prompts = ["the cat sat on the mat and", "one two three"]

    def texts(llm: LLM) -> list[tuple[int, ...]]:
        return [one.outputs[0].token_ids for params in many for one in llm.generate(prompts, params)]

    with LLM(str(folders(kind)), dtype=dtype, method="vanilla") as plain:
        expected = texts(plain)
    options: dict[str, Any] = {"placement": "inline", "policy": "fixed", "verify": "tree", "beam_width": 2, "budget": 6}
    with LLM(str(folders(kind)), str(tmp_path), method="sps", dtype=dtype, **options) as llm:
        assert texts(llm) == expected


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (OWN_INPUTS, {"metadata": {"attention.shared_kv_layers": 6}}, "attention.shared_kv_layers is 6, of 6 layers"),
        (OWN_INPUTS, {"metadata": {"attention.shared_kv_layers": 2}}, "has MLPs of widths that are not known here"),
        (OWN_INPUTS, {"metadata": {"attention.shared_kv_layers": True}}, "attention.shared_kv_layers is True"),
        (OWN_INPUTS, {"metadata": {"feed_forward_length": [96] * 3 + [128] * 3}}, "has MLPs of widths that are not"),
        (OWN_INPUTS, {"metadata": {"embedding_length_per_layer_input": 32}}, "has shape"),
        (OWN_INPUTS, {"metadata": {"embedding_length_per_layer_input": "x"}}, "embedding_length_per_layer_input is x"),
        (OWN_INPUTS, {"without": ("per_layer_token_embd.weight",)}, "model.embed_tokens_per_layer.weight is missing"),
        (OWN_INPUTS, {"without": ("blk.1.layer_output_scale.weight",)}, "model.layers.1.layer_scalar is missing"),
        (NO_VALUES, {"metadata": {"attention.key_length_swa": 64}}, "heads whose parts differ in size"),
        (NO_VALUES, {"metadata": {"attention.head_count_kv": [2, 2, 1, 2, 2, 3]}}, "do not fit each other"),
        (NO_VALUES, {"metadata": {"attention.sliding_window_pattern": [True] * 5}}, "tells attention.sliding_window_p"),
        (NO_VALUES, {"metadata": {"attention.sliding_window": 0}}, "attention.sliding_window is 0"),
        (EXPERTS, {"metadata": {"expert_used_count": 7}}, "take 7 experts each"),
        (EXPERTS, {"metadata": {"expert_count": 5}}, "and there are 5 experts"),
        (EXPERTS, {"without": ("blk.0.ffn_gate_inp.scale",)}, "model.layers.0.router.scale is missing"),
        (EXPERTS, {"metadata": {"expert_count": 0}}, "the config asks for no model.layers.0"),
    ],
)
def test_a_file_that_does_not_fit_is_one_clear_line(
    folders: Callable[[str], Path], tmp_path: Path, kind: str, options: dict[str, Any], said: str
) -> None:
    file = write_gguf(folders(kind), tmp_path / "model.gguf", **options)
    with pytest.raises(ModelError) as caught:
        load_decoder(str(file), cache_dir="")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_shared_layers": 6},
        {"num_kv_shared_layers": 7},
        {"num_kv_shared_layers": "x"},
        {"num_kv_shared_layers": 4},  # a layer without a window would have none to share with
        {"hidden_size_per_layer_input": 32},
        {"use_bidirectional_attention": "all"},
        {"per_layer_config": {"2": {"head_dim": "x"}}},
        {"per_layer_config": {"2": {"head_dim": 48}}},
        {"enable_moe_block": True},
    ],
)
def test_a_config_that_does_not_fit_is_left_to_transformers_and_one_line(
    folders: Callable[[str], Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    to = rewritten(folders(OWN_INPUTS), tmp_path, change)
    assert read_decoder(to, dtype="auto") is None
    with pytest.raises(ModelError) as caught:
        load_decoder(str(to))
        raise ModelError("it runs by transformers' modules")
    assert "\n" not in str(caught.value)


def test_the_text_model_of_a_multimodal_folder_is_read_without_its_other_parts(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    text = json.loads((folders(OWN_INPUTS) / "config.json").read_text())
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": text.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text, "vision_config": {"depth": 1}}))
    weights = load_file(folders(OWN_INPUTS) / "model.safetensors")
    named = {f"model.language_model.{name.removeprefix('model.')}": weight for name, weight in weights.items()}
    more = {"model.vision_tower.encoder.weight": np.ones(3, np.float32), "model.embed_vision.a": np.ones(3, np.float32)}
    save_file({**named, **more}, tmp_path / "model.safetensors", {"format": "pt"})
    model, alone = own(tmp_path), own(folders(OWN_INPUTS))
    assert model.config.model_type == "gemma4_text"
    assert [name for name, _ in model.weights] == [name for name, _ in alone.weights]
    assert np.array_equal(logits_of(model, [5, 6, 7]), logits_of(alone, [5, 6, 7]))
    assert model.layer_inputs is not None
    table, (pages,) = model.layer_inputs.table, model.pages
    assert any(np.shares_memory(table, one) for one in pages.arrays.values())
