"""Models in GGUF files are those that the files were made of, and each wrong file is one clear line."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import ModelInfo

from card.api.llm import LLM
from card.backends.transformers.loading import load_model
from card.config import SamplingParams
from card.errors import ModelError, VocabularyError
from card.kernels.formats import BLOCK_FORMATS, BlockFormat
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import BFLOAT16, FLOAT16, dtype_name
from card.models import loading
from card.models.architectures import all_architectures
from card.models.facts import end_token_ids, parameter_count
from card.models.files import kept_weights
from card.models.files.gguf import source as gguf_source
from card.models.files.gguf.header import GgufError
from card.models.loading import check_pair, load_decoder, load_tokenizer
from card.models.own.decoder_model import DecoderModel, is_int8
from card.models.protocol import Extension
from card.models.runners import plain_runner
from card.models.warn_once import warn_once
from card.text.prompts import encode_chat
from tests.damage import damages
from tests.examples import EXAMPLES
from tests.gguf_files import KINDS, demo_tokenizer, round_to, save_model, write_gguf
from tests.reaching_in import say_why_not_int8
from tests.shortage import no_more_files

TEXT = "Anna has 25 apples,\n\n  she's got x=1234 of them: \tnaïve café 北京 <|end|> 7."


@pytest.fixture(scope="module")
def tiny(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file; not to be changed."""
    return write_gguf(folders("llama, tied"), tmp_path_factory.mktemp("tiny") / "tiny.gguf", kind=Kind.F16)


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def logits(model: Any) -> torch.Tensor:
    runner = plain_runner(model, max_model_len=64)
    return torch.from_numpy(runner.forward([Extension(runner.open(), list(range(3, 40)), range(-1, 36))])[0])


def entries(cache: str) -> list[str]:
    return sorted(one.name.partition("-")[2] for one in (Path(cache) / "gguf").glob("*-v*") if one.is_dir())


def failure(file: Path, cache: str, load: Callable[..., object] = load_decoder) -> str:
    """Return the text of the error that loading raises: one line, and nothing is left behind."""
    with pytest.raises(ModelError) as caught:
        load(file, cache_dir=cache)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    assert text.startswith(str(file))
    assert not list(Path(cache).rglob("*.unfinished"))
    assert not [one for one in entries(cache) if one not in ("v6-facts3", "v6-text5")]
    return text.removeprefix(str(file)).strip()


# ---- the same model -------------------------------------------------------------------------------------------------


UNKEPT = [
    pytest.param(kind, False, marks=pytest.mark.slow if idx % 4 else ()) for idx, kind in enumerate(sorted(KINDS)[::4])
]


@pytest.mark.parametrize(("kind", "kept"), [*((kind, True) for kind in KINDS), *UNKEPT])
def test_logits_and_facts_are_those_of_the_folder(folders, tmp_path, cache, kind, kept):
    file = write_gguf(folders(kind), tmp_path / "model.gguf")
    where = cache if kept else ""
    own, theirs = load_decoder(file, cache_dir=where), load_decoder(folders(kind))
    assert type(own) is DecoderModel
    assert own.dtype == np.float32
    assert torch.equal(logits(own), logits(theirs))
    known_by_name = load_tokenizer(folders(kind)).convert_tokens_to_ids("<|endoftext|>")
    assert end_token_ids(own) == end_token_ids(theirs) | {known_by_name}
    assert parameter_count(own) == parameter_count(theirs)
    assert own.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    transformers_own = load_model(file, cache_dir=where)
    assert type(transformers_own) is KINDS[kind][0]
    assert torch.equal(logits(transformers_own), logits(theirs))
    assert Path(cache).exists() == kept


@pytest.mark.parametrize("kind", ["phi3", "phi3, longrope in part", "qwen3_next"])
def test_queries_keys_and_values_may_be_apart_or_one_tensor(folders, tmp_path, cache, kind):
    file = write_gguf(folders(kind), tmp_path / "model.gguf", other_cuts=True)
    theirs = load_decoder(folders(kind))
    assert torch.equal(logits(load_decoder(file, cache_dir=cache)), logits(theirs))
    assert torch.equal(logits(load_model(file, cache_dir=cache)), logits(theirs))


@pytest.mark.parametrize(
    ("kind", "named", "metadata"),
    [
        ("granite", "granitemoe", {}),
        ("granite", "granitemoe", {"expert_count": 0}),
        ("granitemoe", "granite", {}),
        ("granitemoeshared", "granite", {}),
        ("qwen2", "qwen2vl", {"rope.dimension_sections": [2, 3, 3, 0]}),
        ("qwen3", "qwen3vl", {"rope.dimension_sections": [4, 6, 6, 0], "n_deepstack_layers": 3}),
        ("qwen3_moe", "qwen3vlmoe", {"rope.dimension_sections": [4, 6, 6, 0], "n_deepstack_layers": 3}),
    ],
)
def test_files_may_have_another_name_and_be_the_same_model(folders, tmp_path, cache, kind, named, metadata):
    file = write_gguf(folders(kind), tmp_path / "model.gguf", named=named, metadata=metadata)
    own, theirs = load_decoder(file, cache_dir=cache), load_decoder(folders(kind))
    assert own.config.model_type == theirs.config.model_type
    assert torch.equal(logits(own), logits(theirs))


def test_which_layers_attend_is_read_from_a_list_or_a_period(folders, tmp_path, cache):
    kind = "qwen3_5, a key each"
    layers = {"attention.recurrent_layers": [True, True, True, False], "full_attention_interval": 2}
    stated = write_gguf(folders(kind), tmp_path / "list.gguf", metadata=layers)
    usual = write_gguf(folders(kind), tmp_path / "period.gguf")
    own, other = (load_decoder(file, cache_dir=cache) for file in (stated, usual))
    assert own.config.layer_types == other.config.layer_types
    assert torch.equal(logits(own), logits(other))


def test_rates_of_decay_that_are_none_are_damage(folders, tmp_path, cache):
    rates = np.array([-1.0, 0.5, -1.0, -1.0], np.float32)
    file = write_gguf(folders("qwen3_5"), tmp_path / "m.gguf", blocks={"blk.1.ssm_a": (Kind.F32, rates)})
    with pytest.raises(ModelError, match=r"damaged: blk\.1\.ssm_a has numbers that are not below 0"):
        load_decoder(file, cache_dir=cache)


@pytest.mark.parametrize(
    ("stated", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),  # llama.cpp takes linear for granted
        ({"rope.scale_linear": 4.0}, 4.0),  # the old name
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scale_linear": 0.0}, None),
    ],
)
def test_angles_are_scaled_as_the_file_says_in_each_of_its_ways(folders, tmp_path, cache, stated, factor):
    folder = Path(shutil.copytree(folders("qwen2"), tmp_path / "folder"))
    config = json.loads((folder / "config.json").read_text())
    if factor is not None:
        config["rope_parameters"] |= {"rope_type": "linear", "factor": factor}
    (folder / "config.json").write_text(json.dumps(config))
    own = load_decoder(write_gguf(folders("qwen2"), tmp_path / "model.gguf", metadata=stated), cache_dir=cache)
    assert torch.equal(logits(own), logits(load_model(folder)))
    assert (own.config.rope_parameters["rope_type"] == "linear") == (factor is not None)


@pytest.mark.parametrize("quantised", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_quantised_weights_are_what_is_left_of_them(folders, tmp_path, cache, kind, quantised):
    folder = tmp_path / "rounded"
    shutil.copytree(folders(kind), folder)
    round_to(folder, quantised)
    file = write_gguf(folders(kind), tmp_path / "model.gguf", kind=quantised)
    for dtype in ("float32", "bfloat16", "float64"):
        own, theirs = (load_decoder(one, dtype=dtype, cache_dir=cache) for one in (file, folder))
        assert dtype_name(own.dtype) == dtype
        assert torch.equal(logits(own), logits(theirs))
    stored = {Kind.F16: FLOAT16, Kind.BF16: BFLOAT16}.get(quantised)
    if stored is not None:
        assert load_decoder(file, cache_dir=cache).dtype == stored


def test_a_head_that_equals_the_embeddings_is_shared(folders, tmp_path, cache):
    model = load_model(folders("llama, tied"))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.clone())
    model.save_pretrained(tmp_path / "apart")
    demo_tokenizer().save_pretrained(tmp_path / "apart")
    file = write_gguf(tmp_path / "apart", tmp_path / "model.gguf", kind=Kind.Q8_0)
    own = load_decoder(file, dtype="bfloat16", cache_dir=cache)
    assert own.lm_head.weight is own.embeddings
    assert parameter_count(own) == parameter_count(load_model(folders("llama, tied")))


def test_text_becomes_the_same_tokens(folders, tiny, cache):
    for _ in range(2):  # built of the file, then read from the cache
        own, theirs = load_tokenizer(tiny, cache_dir=cache), load_tokenizer(folders("llama, tied"))
        assert own.get_vocab() == theirs.get_vocab()
        assert own.encode(TEXT) == theirs.encode(TEXT)
        assert own.decode(own.encode(TEXT)) == theirs.decode(theirs.encode(TEXT))
        assert own.chat_template == theirs.chat_template
        assert own.special_tokens_map == theirs.special_tokens_map
        chat = [{"role": "user", "content": TEXT}]
        assert encode_chat(own, chat) == encode_chat(theirs, chat)


def test_vocabularies_that_are_padded_differently_fit_each_other(folders, tmp_path, cache):
    target = write_gguf(folders("qwen2"), tmp_path / "target.gguf", num_pads=64)
    draft = write_gguf(folders("qwen2"), tmp_path / "draft.gguf", num_pads=32, kind=Kind.Q8_0)
    tokenizer, model = load_tokenizer(target, cache_dir=cache), load_decoder(target, cache_dir=cache)
    check_pair(tokenizer, model, draft, cache_dir=cache)
    check_pair(tokenizer, model, folders("qwen2"), cache_dir=cache)
    other = demo_tokenizer()
    other.add_tokens(["<|more|>"])
    save_model(tmp_path / "other", "qwen2", other)
    foreign = write_gguf(tmp_path / "other", tmp_path / "other.gguf")
    with pytest.raises(VocabularyError, match="only the draft's has token"):
        check_pair(tokenizer, model, foreign, cache_dir=cache)


def test_a_draft_with_the_targets_tokenizer_is_checked_without_reading_it(folders, tmp_path, cache, monkeypatch):
    target = write_gguf(folders("qwen2"), tmp_path / "target.gguf")
    draft = write_gguf(folders("llama"), tmp_path / "draft.gguf", kind=Kind.Q8_0)
    other = write_gguf(folders("llama"), tmp_path / "other.gguf", general={"tokenizer.ggml.add_eos_token": True})
    tokenizer, read = load_tokenizer(target, cache_dir=cache), []
    monkeypatch.setattr(loading, "load_tokenizer", lambda *one, **options: read.append(one) or tokenizer)
    for kept_in in (cache, ""):
        check_pair(tokenizer, target, draft, cache_dir=kept_in, is_own=True)
        assert read == []
        check_pair(tokenizer, target, draft, cache_dir=kept_in)  # somebody's own tokenizer may be another one
        check_pair(tokenizer, target, other, cache_dir=kept_in, is_own=True)
        assert read == [(draft,), (other,)]
        read.clear()


def test_a_pair_of_files_decodes_as_the_pair_of_folders(folders, tmp_path, cache):
    save_model(tmp_path / "draft", "llama", demo_tokenizer(), noise=0.1)
    files = [
        str(write_gguf(folder, tmp_path / f"{idx}.gguf"))
        for idx, folder in enumerate((folders("llama"), tmp_path / "draft"))
    ]
    options = {"dtype": "float32", "cache_dir": cache}
    with LLM(str(folders("llama")), **options, method="vanilla") as plain:
        expected = plain.generate(["Anna has 25 apples."], SamplingParams(max_tokens=24, temperature=0.0))[0]
    for placement in ("inline", "process"):
        with LLM(*files, method="sps", placement=placement, **options) as llm:
            output = llm.generate(["Anna has 25 apples."], SamplingParams(max_tokens=24, temperature=0.0))[0]
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.outputs[0].text == expected.outputs[0].text


# ---- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(why_not_int8() is not None, reason=str(why_not_int8()))
@pytest.mark.parametrize("is_quick", [True, False])
def test_a_file_whose_types_do_not_run_as_they_are_runs_in_integers_on_every_processor(
    folders, tmp_path, cache, monkeypatch, caplog, is_quick
):
    monkeypatch.setattr("card.backends.transformers.loading.computes_bfloat16", lambda device: is_quick)
    monkeypatch.delitem(cast(dict[int, BlockFormat], BLOCK_FORMATS), Kind.MXFP4)
    file = write_gguf(folders("qwen2"), tmp_path / "other.gguf", kind=Kind.MXFP4)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        model = load_decoder(file, cache_dir=cache)
    assert (is_int8(model), model.has_blocks) == (True, False)
    assert [one for one in caplog.messages if "cannot run with its own blocks" in one] == caplog.messages != []
    assert not is_int8(load_decoder(file, dtype="bfloat16", cache_dir=cache))


def test_a_quantised_file_runs_in_integers_where_exact_passes_run(folders, tmp_path, cache, monkeypatch):
    monkeypatch.setattr("card.backends.transformers.loading.computes_bfloat16", lambda device: False)
    files = {
        kind: write_gguf(folders("qwen2"), tmp_path / f"{kind.name}.gguf", kind=kind) for kind in (Kind.Q8_0, Kind.BF16)
    }
    for reason in (None, "this processor is too old"):
        say_why_not_int8(monkeypatch, reason)
        quantised, stored = (load_decoder(file, cache_dir=cache) for file in files.values())
        assert is_int8(quantised) == (reason is None)
        assert (type(quantised) is DecoderModel and quantised.has_blocks) == (reason is None)
        as_it_runs = "float32" if reason else "bfloat16"  # our machine code multiplies 16 bits
        assert (is_int8(stored), dtype_name(stored.dtype)) == (False, as_it_runs)
        asked = load_decoder(files[Kind.Q8_0], dtype="bfloat16", cache_dir=cache)
        assert (is_int8(asked), dtype_name(asked.dtype)) == (False, "bfloat16")


def test_a_second_start_converts_nothing_and_needs_no_package(tiny, cache, monkeypatch):
    first = logits(load_decoder(tiny, cache_dir=cache))
    load_tokenizer(tiny, cache_dir=cache)
    assert entries(cache) == ["v6-facts3", "v6-float16", "v6-text5"]

    def refuse(*_: object) -> None:
        raise AssertionError("it was converted again")

    monkeypatch.setattr(gguf_source, "read_gguf", refuse)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert torch.equal(logits(load_decoder(tiny, cache_dir=cache)), first)
    assert len(load_tokenizer(tiny, cache_dir=cache)) == len(demo_tokenizer())


def test_another_file_of_the_same_name_is_converted_anew(folders, tmp_path, cache):
    file = write_gguf(folders("llama"), tmp_path / "model.gguf")
    first = logits(load_decoder(file, cache_dir=cache))
    write_gguf(folders("llama, tied"), file)
    assert not torch.equal(logits(load_decoder(file, cache_dir=cache)), first)
    assert entries(cache) == ["v6-facts3", "v6-facts3", "v6-float32", "v6-float32"]


def test_a_cache_that_cannot_be_written_costs_one_line(tiny, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        own = load_decoder(tiny, cache_dir=str(tmp_path / "cache"))
    assert torch.equal(logits(own), logits(load_decoder(tiny, cache_dir="")))
    assert len(caplog.messages) == 1
    assert "not kept in" in caplog.messages[0]
    assert len(load_tokenizer(tiny, cache_dir=str(tmp_path / "cache"))) == len(demo_tokenizer())


def kept_files(cache: str) -> dict[str, Path]:
    """Return the files that are kept, by what they are of and their name."""
    files = [one for one in Path(cache).rglob("*") if one.is_file()]
    return {f"{one.parent.name.rpartition('-v6-')[2]}/{one.name}": one for one in files}


def test_what_is_kept_and_was_damaged_is_made_again(tiny, cache):
    expected = logits(load_decoder(tiny, cache_dir=cache))
    ids = load_tokenizer(tiny, cache_dir=cache).encode("how many cats sat?")
    assert {"facts3/facts.json", "float16/model.safetensors", "text5/seal.json"} <= kept_files(cache).keys()
    for idx, name in enumerate(kept_files(cache)):
        whole = kept_files(cache)[name].read_bytes()
        every = [*damages(whole)]
        for damage in every if EXAMPLES == "new" else every[idx % 3 :: 3]:  # each in some of the files
            kept_files(cache)[name].write_bytes(damage)
            assert torch.equal(logits(load_decoder(tiny, cache_dir=cache)), expected)
            assert load_tokenizer(tiny, cache_dir=cache).encode("how many cats sat?") == ids
        assert kept_files(cache)[name].read_bytes() == whole or name.endswith("seal.json")
    kept_files(cache)["facts3/seal.json"].write_bytes(b'{"\xf0\x28": 1}')
    assert torch.equal(logits(load_decoder(tiny, cache_dir=cache)), expected)


def test_weights_that_were_only_touched_are_read_and_taken(tiny, cache):
    load_decoder(tiny, cache_dir=cache)
    file = kept_files(cache)["float16/model.safetensors"]
    number, content = file.stat().st_ino, file.read_bytes()
    file.write_bytes(content)
    os.utime(file, (1, 1))
    load_decoder(tiny, cache_dir=cache)
    assert file.stat().st_ino == number, "they are as they were"
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, (1, 1))
    load_decoder(tiny, cache_dir=cache)
    assert file.stat().st_ino != number and file.read_bytes() == content


@pytest.mark.parametrize("spoil", ["store", "entry", "file"])
def test_weights_that_others_could_have_written_are_not_taken(tiny, cache, caplog, spoil):
    expected = logits(load_decoder(tiny, cache_dir=cache))
    file = kept_files(cache)["float16/model.safetensors"]
    number = file.stat().st_ino
    {"store": file.parent.parent, "entry": file.parent, "file": file}[spoil].chmod(0o777)
    assert torch.equal(logits(load_decoder(tiny, cache_dir=cache)), expected)
    if spoil == "store":
        assert file.stat().st_ino == number, "nothing is kept there"
        (line,) = caplog.messages
        assert "is not used for converted weights: others can write to" in line
    else:
        assert file.stat().st_ino != number and not caplog.messages
        assert file.stat().st_mode & 0o077 == file.parent.stat().st_mode & 0o077 == 0


def test_without_files_to_open_weights_are_converted_in_memory_and_kept_ones_stay(tiny, cache):
    load_decoder(tiny, cache_dir=cache)
    store, name = kept_weights.KeptWeights(Path(cache) / "gguf"), kept_files(cache)["facts3/facts.json"].parent.name
    number = (Path(cache) / "gguf" / name).stat().st_ino
    with no_more_files():
        assert store.find(name) is None
        assert store.make(name, 0, lambda folder: (folder / "facts.json").touch()) is None
    assert store.find(name) is not None and (Path(cache) / "gguf" / name).stat().st_ino == number


def test_two_processes_at_once_make_one_entry(tiny, cache):
    code = (
        "import sys; from card.models.loading import load_decoder, load_tokenizer\n"
        "load_tokenizer(sys.argv[1], cache_dir=sys.argv[2])\n"
        "print(load_decoder(sys.argv[1], cache_dir=sys.argv[2]).lm_head.weight.sum(dtype='float64'))"
    )
    command = [sys.executable, "-c", code, str(tiny), cache]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate() for one in running]
    assert len({out for out, _ in said}) == 1, said
    assert all(err == "" for _, err in said)
    assert said[0][0].strip() == str(load_decoder(tiny, cache_dir="").lm_head.weight.sum(dtype="float64"))
    assert entries(cache) == ["v6-facts3", "v6-float16", "v6-text5"]


def test_the_oldest_entries_make_room_and_no_leftovers_stay(tmp_path):
    def fill(folder: Path) -> None:
        (folder / "weights").write_bytes(bytes(1000))

    store = kept_weights.KeptWeights(tmp_path / "store", most_bytes=3500)
    for age, name in ((300, "a"), (200, "b"), (100, "c")):
        folder = store.make(name, 1000, fill)
        assert folder is not None
        past = folder.stat().st_mtime - age
        os.utime(folder, (past, past))
    left = tmp_path / "store" / "killed.unfinished"
    left.mkdir()
    os.utime(left, (1, 1))
    assert store.find("a") is not None  # the oldest one is used again
    store.make("d", 1000, fill)
    assert {one.name for one in (tmp_path / "store").iterdir() if one.is_dir()} == {"a", "c", "d"}


def test_a_single_model_may_be_larger_than_all_may_be_together(tmp_path, caplog):
    def filled(num_bytes: int) -> Callable[[Path], object]:
        return lambda folder: (folder / "weights").write_bytes(bytes(num_bytes))

    def kept() -> set[str]:
        return {one.name for one in (tmp_path / "store").iterdir() if one.is_dir()}

    store = kept_weights.KeptWeights(tmp_path / "store", most_bytes=3500)
    for age, (name, num_bytes) in enumerate((("a", 1000), ("b", 1000), ("large", 5000), ("c", 1000))):
        folder = store.make(name, num_bytes, filled(num_bytes))
        assert folder is not None
        os.utime(folder, (1000 + age, 1000 + age))
    assert kept() == {"a", "b", "large", "c"}
    (line,) = caplog.messages
    assert line.startswith("the converted weights take 0.0 GB below ") and line.endswith(
        "as a single model that is larger"
    )
    assert store.make("d", 1000, filled(1000)) is not None  # the bound holds for all others
    assert kept() == {"b", "large", "c", "d"}
    assert store.make("other large", 4000, filled(4000)) is not None
    assert kept() == {"b", "other large", "c", "d"}


def test_a_full_disk_costs_no_other_entry(tmp_path, monkeypatch, caplog):
    def fill(folder: Path) -> None:
        (folder / "weights").write_bytes(bytes(1000))

    store = kept_weights.KeptWeights(tmp_path / "store")
    assert store.make("a", 1000, fill) is not None
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(kept_weights.shutil, "disk_usage", lambda _: full)
    assert store.make("b", 1000, fill) is None
    assert "the disk has no room for them and 1.1 GB besides" in caplog.text
    assert (tmp_path / "store" / "a").is_dir()


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path):
    store = kept_weights.KeptWeights(tmp_path / "store")

    def full(folder: Path) -> None:
        (folder / "weights").write_bytes(bytes(10))
        raise OSError(28, "No space left on device")

    def broken(folder: Path) -> None:
        raise GgufError("is cut off")

    assert store.make("a", 10, full) is None
    with pytest.raises(GgufError):
        store.make("a", 10, broken)
    assert list((tmp_path / "store").iterdir()) == []


# ---- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.00001, 0.001, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("load", [load_decoder, load_model, load_tokenizer])
def test_a_file_that_is_cut_off_is_refused(tiny, tmp_path, cache, share, load):
    content = tiny.read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(content[: max(6, int(len(content) * share))])
    said = failure(file, cache, load)
    assert said.startswith("is cut off") and said.endswith("; copy or download it again")
    assert not Path(cache).exists() or not [one for one in Path(cache).rglob("*") if one.is_file()]


def test_other_files_are_refused(tmp_path, cache):
    file = tmp_path / "model.gguf"
    with pytest.raises(ModelError, match=r"there is no file .*model.gguf; give a model file, or a name on the hub"):
        load_decoder(file)
    file.write_bytes(b"PK\x03\x04")
    assert failure(file, cache) == "is no GGUF file: it does not begin with GGUF; copy or download it again"
    file.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    assert "version 1 of the GGUF format" in failure(file, cache)
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    assert "of the GGUF format" in failure(file, cache)


@pytest.mark.parametrize("seed", range(30))
def test_damage_anywhere_in_the_header_is_one_line_or_harmless(tiny, tmp_path, cache, seed):
    generator = torch.Generator().manual_seed(seed)
    content = bytearray(tiny.read_bytes())
    for place in torch.randint(4, 900, (8,), generator=generator).tolist():
        content[place] = int(torch.randint(0, 256, (1,), generator=generator))
    file = tmp_path / "damaged.gguf"
    file.write_bytes(content)
    try:
        load_decoder(file, cache_dir="")
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"without": ("blk.1.ffn_up.weight",)},
            "is incomplete: its tensor model.layers.1",
        ),
        ({"without": ("token_embd.weight",)}, "has no tensor token_embd.weight"),
        ({"metadata": {"feed_forward_length": 128}}, "has shape [96, 64], the config asks for [128, 64]"),
        ({"metadata": {"block_count": 1}}, "the config asks for no model.layers.1"),
        ({"metadata": {"expert_count": 8}}, "its llama.expert_used_count is missing"),
        ({"metadata": {"attention.sliding_window": 64}}, "has a sliding window"),
        ({"metadata": {"attention.head_count": 0}}, "cannot be used: its llama.attention.head_count is 0"),
        ({"metadata": {"rope.dimension_count": 8}}, "differ in size: rope.dimension_count is 8, not 16"),
        ({"metadata": {"attention.value_length": 32}}, "differ in size: attention.value_length is 32, not 16"),
        ({"metadata": {"attention.head_count_kv": [2, 4]}}, "has shape [32, 64], the config asks for [64, 64]"),
        ({"metadata": {"attention.head_count_kv": [2, 0]}}, "cannot be used: its llama.attention.head_count_kv is 0"),
        ({"metadata": {"attention.head_count_kv": [2, 3]}}, "has sizes of heads or layers that do not fit each other"),
        ({"metadata": {"attention.head_count_kv": [2]}}, "it has 2 layers and tells attention.head_count_kv of 1"),
        ({"metadata": {"attention.key_length": [16, 32]}}, "has layers that differ in attention.key_length"),
        ({"metadata": {"nextn_predict_layers": 2}}, "its llama.nextn_predict_layers is 2, of 2 layers"),
        ({"metadata": {"nextn_predict_layers": 1.5}}, "its llama.nextn_predict_layers is 1.5, of 2 layers"),
        ({"metadata": {"attention.scale": 1.0}}, "asks for attention.scale 1.0, not 0.25"),
        ({"metadata": {"attention.causal": False}}, "asks for attention.causal False"),
        ({"metadata": {"attention.clamp_kqv": 8.0}}, "asks for attention.clamp_kqv 8.0"),
        ({"metadata": {"logit_scale": 2.0}}, "asks for logit_scale 2.0"),
        ({"metadata": {"rope.scaling.factor": -2.0}}, "cannot be used: its llama.rope.scaling.factor is -2.0"),
        ({"metadata": {"rope.scale_linear": float("inf")}}, "cannot be used: its llama.rope.scale_linear is inf"),
        ({"general": {"general.type": "adapter"}}, "holds no model but the type adapter"),
    ],
)
def test_a_model_that_is_not_whole_or_asks_for_more_is_refused(folders, tmp_path, cache, options, said):
    assert said in failure(write_gguf(folders("llama"), tmp_path / "model.gguf", **options), cache)


def test_a_model_that_lacks_some_of_its_biases_is_refused(folders, tmp_path, cache):
    file = write_gguf(folders("llama, biases"), tmp_path / "model.gguf", without=("blk.0.attn_output.bias",))
    assert "is incomplete: its tensor model.layers.0.self_attn.o_proj.bias is missing" in failure(file, cache)


def test_scaling_of_angles_beside_llama3s_own_is_refused(folders, tmp_path, cache):
    metadata = {"rope.scaling.factor": 2.0}
    file = write_gguf(folders("llama, longer"), tmp_path / "model.gguf", metadata=metadata)
    assert "scales its angles twice, by rope.scaling.factor and by rope_freqs.weight" in failure(file, cache)


def test_entries_that_are_not_known_are_named_and_those_that_change_nothing_are_not(folders, tmp_path, cache, caplog):
    harmless = {"vocab_size": 7, "tensor_data_layout": "Meta AI original pth", "rope.scaling.finetuned": True}
    idle = {"expert_count": 0, "logit_scale": 1.0, "attention.scale": 0.25, "attention.head_count_kv": [2, 2]}
    with caplog.at_level(logging.WARNING):
        load_decoder(write_gguf(folders("llama"), tmp_path / "known.gguf", metadata={**harmless, **idle}), cache_dir="")
    assert not caplog.messages
    unknown = {"attention.new_thing": 4, "hyper.rank": 2}
    general = {"tokenizer.ggml.new_thing": True, "general.new_thing": True}
    file = write_gguf(folders("llama"), tmp_path / "unknown.gguf", metadata=unknown, general=general)
    with caplog.at_level(logging.WARNING):
        for load in (load_tokenizer, load_decoder):
            load(file, cache_dir="")
    assert caplog.messages == [
        f"{file} says something of llama.attention.new_thing, llama.hyper.rank, tokenizer.ggml.new_thing, which is not "
        "known here: left out"
    ]


def test_arrays_of_arrays_are_refused_however_deep_they_are(tmp_path, cache):
    file, nested = tmp_path / "model.gguf", (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    name = (1).to_bytes(8, "little") + b"a"
    counts = (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + counts + name + nested[:4] + nested * 5000)
    assert "array of arrays" in failure(file, cache)


@pytest.mark.parametrize("pattern", [2, [True, False, True, False, True, False]])
def test_which_layers_have_a_window_is_followed(folders, tmp_path, cache, pattern):
    stated = {"attention.sliding_window_pattern": pattern}
    own = load_decoder(write_gguf(folders("gemma3"), tmp_path / "model.gguf", metadata=stated), cache_dir=cache)
    assert own.config.layer_types == ["sliding_attention", "full_attention"] * 3


@pytest.mark.parametrize(
    ("kind", "stated", "words"),
    [
        (
            "gemma3",
            {"attention.sliding_window_pattern": [True, False]},
            "is damaged: it has 6 layers and tells attention",
        ),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "cannot be used: its gemma3.attention.sliding_window_pa"),
        ("glm4", {"rope.dimension_count": 34}, "is damaged: 34 channels of heads of 32 turn"),
    ],
)
def test_damaged_windows_and_angles_are_one_clear_line(folders, tmp_path, cache, kind, stated, words):
    assert failure(write_gguf(folders(kind), tmp_path / "model.gguf", metadata=stated), cache).startswith(words)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        (b"mamba", "use a folder saved by transformers (its mamba runs)"),
        (b"llamb", "try its folder"),
    ],
)
def test_an_unknown_architecture_is_told_all_that_is_read_and_what_else_works(tiny, tmp_path, cache, name, instead):
    content, file = tiny.read_bytes(), tmp_path / "model.gguf"
    stated = b"general.architecture" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert content.count(stated + b"llama") == 1
    file.write_bytes(content.replace(stated + b"llama", stated + name))
    words = (
        f"holds a model of the architecture {name.decode()}, which is not read from GGUF files: {instead}; those of "
    )
    said = failure(file, cache)
    assert said.startswith(words) and said.endswith(" are read")
    read = said.removeprefix(words).removesuffix(" are read").split(", ")
    assert read == list(dict.fromkeys(name for one in all_architectures() for name in one.gguf.names))


def test_unknown_quantisations_are_refused(tiny, tmp_path, cache):
    content, file = tiny.read_bytes(), tmp_path / "model.gguf"
    place = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    for type_id, called in ((99, "type 99"), (24, "I8"), (9, "Q8_1")):
        file.write_bytes(content[:place] + type_id.to_bytes(4, "little") + content[place + 4 :])
        assert f"has weights quantised as {called} (blk.0.ffn_up.weight)" in failure(file, cache)


def test_a_file_that_changes_while_it_is_read_is_noticed(tiny, tmp_path, cache, monkeypatch):
    file = Path(shutil.copy(tiny, tmp_path / "model.gguf"))
    read = gguf_source.write_weights

    def touch(*args: Any) -> None:
        read(*args)
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(gguf_source, "write_weights", touch)
    assert failure(file, cache) == "changed while it was read; start again once it is complete"


def test_a_file_that_becomes_shorter_while_it_is_read_is_noticed(tiny, tmp_path, cache, monkeypatch):
    file = Path(shutil.copy(tiny, tmp_path / "model.gguf"))
    opened = gguf_source.read_gguf

    def cut(path: Path) -> Any:
        model = opened(path)
        os.truncate(file, file.stat().st_size // 2)
        return model

    monkeypatch.setattr(gguf_source, "read_gguf", cut)
    content = file.read_bytes()
    for where in (cache, ""):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"changed while it was read|is cut off: it became shorter"):
            load_decoder(file, cache_dir=where)


def test_a_folder_of_files_says_which_to_name(tiny, tmp_path):
    shutil.copy(tiny, tmp_path / "tiny.Q4.gguf")
    with pytest.raises(ModelError, match=r"name the file, such as .*tiny.Q4.gguf$"):
        load_model(tmp_path)


# ---- on the hub -----------------------------------------------------------------------------------------------------


def test_a_file_on_the_hub_is_fetched_by_its_name(tiny, cache, monkeypatch):
    asked: list[Any] = []

    def fetch(repository: str, file: str, **options: Any) -> str:
        asked.append((repository, file, options))
        return str(tiny)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: ModelInfo(id="org/repo"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert load_decoder("org/repo/sub/tiny.gguf", cache_dir=cache).dtype == FLOAT16
    assert asked == [("org/repo", "sub/tiny.gguf", {"local_files_only": False, "tqdm_class": None})]


def test_a_file_that_the_hub_cannot_give_is_one_line():
    with pytest.raises(ModelError) as caught:
        load_decoder("nobody/nothing/model.gguf")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("nobody/nothing/model.gguf is neither a folder here nor in the local cache")
