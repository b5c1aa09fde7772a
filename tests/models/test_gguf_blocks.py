"""Quantised GGUF files run with their own blocks: the model of the file, its texts, and what is kept of it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from card.api.llm import LLM
from card.config import SamplingParams
from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.machine_code import machine_code
from card.models.draft_vocab import restrict_head
from card.models.facts import parameter_count
from card.models.files import tensor_files
from card.models.files.gguf import block_weights
from card.models.files.gguf import source as gguf_source
from card.models.files.gguf.model import open_gguf
from card.models.loading import load_decoder
from card.models.own.decoder_model import is_int8
from card.models.own.exact_layers import products_of
from card.models.own.layers import EmbeddedRows, embedded
from card.models.protocol import Extension
from card.models.runners import how_it_runs, make_runner, plain_runner
from card.models.warn_once import warn_once
from tests.damage import damages
from tests.gguf_files import demo_tokenizer, save_model, write_gguf

REASON = why_not_int8()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TEXT = list(range(3, 40))
KINDS = {
    "llama, other heads": Kind.Q4_0,
    "llama, biases": Kind.Q5_0,
    "granite": Kind.Q8_0,
    "qwen3": Kind.Q4_1,
    "gemma3": Kind.Q8_0,
    "lfm2": Kind.Q8_0,
    "qwen3_5": Kind.Q8_0,
    "qwen3_next": Kind.Q8_0,
    "lfm2_moe": Kind.Q8_0,
}
KINDS |= {"gemma4, own inputs": Kind.Q4_0, "gemma4, keys as values": Kind.Q8_0, "gemma4, experts": Kind.Q4_0}
KINDS |= dict.fromkeys(("glm4_moe", "ernie4_5_moe", "ministral3", "granitemoeshared"), Kind.Q8_0)
KINDS |= {"phi3": Kind.Q8_0, "glm4": Kind.Q5_1, "cohere2": Kind.Q8_0}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that gives the file of a tiny model of some kind, written once."""
    made: dict[tuple[str, Kind, float], Path] = {}

    def write(kind: str, quantised: Kind, noise: float = 0.0) -> Path:
        if (kind, quantised, noise) not in made:
            folder = tmp_path_factory.mktemp("model")
            save_model(folder, kind, demo_tokenizer(), noise=noise)
            made[kind, quantised, noise] = write_gguf(folder, folder / "model.gguf", kind=quantised)
        return made[kind, quantised, noise]

    return write


def logits(model) -> torch.Tensor:
    runner = plain_runner(model, max_model_len=64)
    return torch.from_numpy(runner.forward([Extension(runner.open(), TEXT, range(-1, len(TEXT) - 1))])[0])


@pytest.mark.parametrize(("kind", "quantised"), KINDS.items())
def test_the_model_is_that_of_the_file(written, tmp_path, kind, quantised):
    file = written(kind, quantised)
    own = load_decoder(file, cache_dir=str(tmp_path))
    assert own.has_blocks
    assert is_int8(own)
    path = how_it_runs(make_runner(own, max_model_len=64))
    assert path.startswith("own pass in the blocks of the file") and "; trees of candidates" in path
    unpacked = load_decoder(file, dtype="float32", cache_dir=str(tmp_path))
    assert parameter_count(own) == parameter_count(unpacked)
    ours, theirs = logits(own), logits(unpacked)
    # Only activations are rounded; other weights, or rows in another order, would give other logits altogether.
    assert (ours - theirs).norm() < (0.4 if own.config.model_type == "qwen3_next" else 0.15) * theirs.norm()


@pytest.mark.parametrize("kind", ["phi3", "qwen3_next"])
def test_blocks_give_the_same_bits_however_a_file_cuts_them(written, tmp_path, kind):
    usual, other = written(kind, Kind.Q8_0), tmp_path / "other.gguf"
    write_gguf(usual.parent, other, kind=Kind.Q8_0, other_cuts=True)
    for cache in (str(tmp_path / "cache"), ""):
        assert torch.equal(*(logits(load_decoder(file, cache_dir=cache)) for file in (usual, other)))


@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_the_code_that_is_prepared_is_all_that_a_model_runs(written, monkeypatch, dtype):
    model = load_decoder(written("qwen3", Kind.Q4_1), dtype=dtype, cache_dir="")
    formats, asked = machine_code("formats"), set[str]()
    multiplier = formats.multiplier
    monkeypatch.setattr(formats, "multiplier", lambda name: asked.add(name) or multiplier(name))
    logits(model)
    assert asked == set(products_of(model)) != set()


def test_what_is_kept_gives_the_bits_of_what_is_packed_in_memory(written, tmp_path, monkeypatch):
    file = written("qwen3", Kind.Q4_1)
    packed = logits(load_decoder(file, cache_dir=""))
    assert torch.equal(logits(load_decoder(file, cache_dir=str(tmp_path))), packed)

    def refuse(*_: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(gguf_source, "read_gguf", refuse)
    assert torch.equal(logits(load_decoder(file, cache_dir=str(tmp_path))), packed)


def test_a_full_disk_costs_one_line_and_no_bit(written, tmp_path, monkeypatch, caplog):
    file = written("qwen3", Kind.Q4_1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    warn_once.cache_clear()
    monkeypatch.setattr(tensor_files.os, "fsync", full)  # when all has been written, as far as a full disk lets it
    with caplog.at_level(logging.WARNING):
        own = logits(load_decoder(file, cache_dir=str(tmp_path)))
    assert [one for one in caplog.messages if "not kept in" in one and "No space left" in one] == caplog.messages != []
    assert torch.equal(own, logits(load_decoder(file, cache_dir="")))
    assert not list(tmp_path.rglob("*.unfinished")) and not list(tmp_path.rglob("*.safetensors"))


def test_a_file_that_changes_while_it_is_packed_is_refused(written, tmp_path, monkeypatch):
    file = Path(shutil.copy(written("qwen3", Kind.Q4_1), tmp_path / "model.gguf"))
    pack = block_weights.pack_blocks

    def touch(*args: Any) -> Any:
        os.utime(file, ns=(1, 1))
        return pack(*args)

    monkeypatch.setattr(block_weights, "pack_blocks", touch)
    for cache in (str(tmp_path / "cache"), ""):
        os.utime(file)
        with pytest.raises(ModelError, match=r"model.gguf changed while it was read; start again once it is complete$"):
            load_decoder(file, cache_dir=cache)
    assert not list(tmp_path.rglob("*.unfinished")) and not list(tmp_path.rglob("*.safetensors"))


def test_two_processes_that_pack_one_file_make_one_entry(written, tmp_path):
    code = (
        "import sys; from card.models.loading import load_decoder\n"
        "model = load_decoder(sys.argv[1], cache_dir=sys.argv[2])\n"
        "print(sum(int(one.data.sum()) for one in (one.weight for one in model.linears) if hasattr(one, 'data')))"
    )
    command = [sys.executable, "-c", code, str(written("qwen3", Kind.Q4_1)), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate() for one in running]
    assert len(set(said)) == 1 and said[0][1] == "" and int(said[0][0]) > 0, said
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1 and not list(tmp_path.rglob("*.unfinished"))


def test_a_file_that_is_gone_is_not_needed_by_a_model_that_has_been_loaded(written, tmp_path):
    file = Path(shutil.copy(written("qwen3", Kind.Q4_1), tmp_path / "model.gguf"))
    model = load_decoder(file, cache_dir=str(tmp_path))
    os.truncate(file, 100)
    assert torch.equal(logits(model), logits(load_decoder(written("qwen3", Kind.Q4_1), cache_dir="")))


def test_a_head_of_some_tokens_and_of_those_that_it_reads_gives_their_logits(written):
    whole = load_decoder(written("llama, biases", Kind.Q5_0), cache_dir="")
    some = restrict_head(whole, [*range(3), 50, 61])
    ids = sorted({*range(3), 50, 61, *TEXT})
    assert torch.equal(logits(some)[:, ids], logits(whole)[:, ids])
    assert torch.isneginf(logits(some)).sum() == len(TEXT) * (logits(whole).shape[1] - len(ids))


@pytest.mark.parametrize("kept", [1, 5, 1000])
def test_rows_of_embeddings_are_those_of_the_file_however_many_are_kept(written, kept):
    embeddings = load_decoder(written("llama, biases", Kind.Q5_0), cache_dir="").embeddings
    rows = EmbeddedRows(embeddings, kept_bytes=4 * embeddings.shape[1] * kept)
    for token_ids in np.random.default_rng(0).integers(0, 12, (40, 7)):
        for ids in (token_ids.tolist(), token_ids[:1].tolist()):
            assert np.array_equal(rows.of(ids), embedded(embeddings, ids))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_pair_of_files_writes_the_text_of_plain_decoding(written, temperature):
    target, draft = written("llama, biases", Kind.Q5_0), written("llama, biases", Kind.Q5_0, 0.1)
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=seed) for seed in (1, 2, 3)]
    prompts = ["One and two", "Three", "Four plus five is"]
    texts = []
    for more in (
        {"method": "vanilla"},
        {"draft": str(draft), "method": "card", "placement": "inline"},
        {"method": "suffix"},
    ):
        with LLM(str(target), cache=False, **more) as llm:
            outputs = llm.generate(prompts, params)
        texts.append([one.outputs[0].token_ids for one in outputs])
    assert texts[0] == texts[1] == texts[2]


def test_numbers_that_products_cannot_take_are_one_line(written, tmp_path):
    file = written("granite", Kind.Q8_0)
    raw, model = bytearray(file.read_bytes()), open_gguf(file)
    place = next(one for one in model.weights if "q_proj" in one.name).place
    raw[place.offset + 2] = 0x80
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=r"attn_q.weight: it holds the number -128.* use --dtype int8$"):
        load_decoder(tmp_path / "model.gguf", cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("model.safetensors"))


def test_a_scale_that_is_no_number_is_one_line(written, tmp_path):
    raw = bytearray(written("granite", Kind.Q8_0).read_bytes())
    place = next(one for one in open_gguf(written("granite", Kind.Q8_0)).weights if "down" in one.name).place
    raw[place.offset : place.offset + 2] = np.array([np.inf], np.float16).tobytes()
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(
        ModelError, match=r"ffn_down.weight: a scale in it is no finite number; copy or download the file again$"
    ):
        load_decoder(tmp_path / "model.gguf", cache_dir="")


@pytest.mark.parametrize("name", ["model.safetensors", "blocks.json", "seal.json"])
def test_damaged_blocks_that_were_kept_are_packed_again(written, tmp_path, name):
    file = written("qwen3", Kind.Q4_1)
    load_decoder(file, cache_dir=str(tmp_path))
    (kept,) = (one for one in tmp_path.rglob(name) if "blocks" in one.parent.name)
    whole = kept.read_bytes()
    for damage in damages(whole):
        kept.write_bytes(damage)
        load_decoder(file, cache_dir=str(tmp_path))
        assert kept.read_bytes() == whole or name == "seal.json"
