"""A model in several GGUF files is the one that they were made of, and parts that do not fit are one clear line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import ModelInfo
from huggingface_hub.hf_api import RepoSibling

from card.assembly.latency.store import LatencyKey
from card.errors import ModelError
from card.machine.threads import CoreSet
from card.models.files.sources import fetch
from card.models.loading import load_decoder, load_tokenizer
from card.models.protocol import Extension
from card.models.runners import plain_runner
from card.models.shortage import shortage_in_words
from tests.gguf_files import demo_tokenizer, save_model, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; not to be changed."""
    made = tmp_path_factory.mktemp("folder")
    save_model(made, "llama", demo_tokenizer())
    return made


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in one file; not to be changed."""
    return write_gguf(folder, tmp_path_factory.mktemp("whole") / "model.gguf", kind=Kind.Q8_0)


@pytest.fixture
def parts(folder: Path, tmp_path: Path) -> list[Path]:
    """The model in four files."""
    (tmp_path / "parts").mkdir()
    first = write_gguf(folder, tmp_path / "parts" / "model.gguf", kind=Kind.Q8_0, part_tensors=6)
    found = sorted(first.parent.iterdir())
    assert [one.name for one in found] == [f"model-0000{number}-of-00004.gguf" for number in range(1, 5)]
    return found


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def logits(file: Path, cache: str, dtype: str = "auto") -> torch.Tensor:
    runner = plain_runner(load_decoder(file, dtype=dtype, cache_dir=cache), max_model_len=64)
    return torch.from_numpy(runner.forward([Extension(runner.open(), list(range(3, 20)), range(-1, 16))])[0])


def failure(file: Path, cache: str, load: Callable[..., object] = load_decoder) -> str:
    """Return the text of the error that loading raises: one line, and nothing has been kept."""
    with pytest.raises(ModelError) as caught:
        load(file, cache_dir=cache)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400 and text.startswith(f"{file} ")
    assert not list(Path(cache).rglob("*.json"))
    return text.removeprefix(f"{file} ")


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_parts_are_the_model_of_one_file(whole, parts, cache, dtype, is_kept):
    where = cache if is_kept else ""
    assert torch.equal(logits(parts[0], where, dtype), logits(whole, where, dtype))
    assert load_tokenizer(parts[0], cache_dir=where).get_vocab() == load_tokenizer(whole, cache_dir=where).get_vocab()


def test_a_first_part_may_have_no_tensors_and_each_part_an_alignment_of_its_own(folder, whole, tmp_path, cache):
    (tmp_path / "small").mkdir()
    options = {"part_tensors": 9, "small_first": True, "general": {"general.alignment": 128}}
    first = write_gguf(folder, tmp_path / "small" / "model.gguf", kind=Kind.Q8_0, **options)
    assert torch.equal(logits(first, cache), logits(whole, cache))


def test_parts_are_found_beside_a_link_as_the_hub_keeps_them(whole, parts, tmp_path, cache):
    (tmp_path / "links").mkdir()
    for number, part in enumerate(parts):
        part.rename(tmp_path / f"blob{number}")
        (tmp_path / "links" / part.name).symlink_to(tmp_path / f"blob{number}")
    assert torch.equal(logits(tmp_path / "links" / parts[0].name, cache), logits(whole, cache))


def test_a_change_of_any_part_is_another_model(parts, cache):
    before = logits(parts[0], cache)
    kept = {one.name for one in (Path(cache) / "gguf").iterdir()}
    assert torch.equal(logits(parts[0], cache), before)
    assert {one.name for one in (Path(cache) / "gguf").iterdir()} == kept
    core_set = CoreSet((0,), 1)
    key = LatencyKey.of("pass", str(parts[0]), dtype="auto", device="cpu", core_set=core_set)
    os.utime(parts[2], ns=(1, 1))
    logits(parts[0], cache)
    assert {one.name for one in (Path(cache) / "gguf").iterdir()} > kept
    assert LatencyKey.of("pass", str(parts[0]), dtype="auto", device="cpu", core_set=core_set) != key


def test_the_memory_that_a_model_needs_is_that_of_all_parts(whole, parts, monkeypatch):
    monkeypatch.setattr("card.models.shortage.in_gigabytes", lambda num_bytes: f"{num_bytes} bytes")
    total = sum(one.stat().st_size for one in parts)
    assert f"has {total} bytes of weights" in shortage_in_words(str(parts[0]))


# ---- what is wrong --------------------------------------------------------------------------------------------------


def _lose(parts: Sequence[Path], other: Path) -> None:
    parts[1].unlink()
    parts[3].unlink()


def _double(parts: Sequence[Path], other: Path) -> None:
    shutil.copy(parts[2], parts[1])


def _mix_counts(parts: Sequence[Path], other: Path) -> None:
    shutil.copy(other / "model-00002-of-00003.gguf", parts[1])


def _cut(parts: Sequence[Path], other: Path) -> None:
    parts[3].write_bytes(parts[3].read_bytes()[:-64])


def _cut_header(parts: Sequence[Path], other: Path) -> None:
    parts[3].write_bytes(parts[3].read_bytes()[:90])


def _spoil(parts: Sequence[Path], other: Path) -> None:
    parts[1].write_bytes(b"PK" + parts[1].read_bytes()[2:])


def _rename(parts: Sequence[Path], other: Path) -> None:
    for number, part in enumerate(parts, 1):
        part.rename(part.with_name(f"model-0000{number}-of-00005.gguf"))


def _take_a_tensor_twice(parts: Sequence[Path], other: Path) -> None:
    content = parts[1].read_bytes()
    assert content.count(b"blk.0.ffn_up.weight") == 1 and b"blk.0.attn_q.weight" in parts[0].read_bytes()
    parts[1].write_bytes(content.replace(b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_lose, "lacks 2 of its 4 parts, the first is model-00002-of-00004.gguf; copy or download all parts to one"),
        (_double, "has a part model-00002-of-00004.gguf that is part 3 by what it says, not 2; copy or download all"),
        (_mix_counts, "has a part model-00002-of-00004.gguf that is of another model: its split.count is 3, not 4;"),
        (_cut, "has a part model-00004-of-00004.gguf that is cut off: "),
        (_cut_header, "has a part model-00004-of-00004.gguf that is cut off or damaged: it ends inside its header"),
        (_spoil, "has a part model-00002-of-00004.gguf that is no GGUF file: it does not begin with GGUF"),
        (_take_a_tensor_twice, "has blk.0.attn_q.weight in two parts, model-00001-of-00004.gguf and model-00002-of-"),
    ],
)
@pytest.mark.parametrize("load", [load_decoder, load_tokenizer])
def test_parts_that_do_not_fit_are_one_clear_line(folder, parts, tmp_path, cache, spoil, said, load):
    (tmp_path / "other").mkdir()
    write_gguf(folder, tmp_path / "other" / "model.gguf", kind=Kind.Q8_0, part_tensors=8)
    spoil(parts, tmp_path / "other")
    assert failure(parts[0], cache, load).startswith(said)


def test_parts_of_a_model_with_as_many_parts_and_other_tensors_are_refused(folder, parts, tmp_path, cache):
    (tmp_path / "other").mkdir()
    options = {"part_tensors": 6, "without": ("blk.0.attn_norm.weight",)}
    write_gguf(folder, tmp_path / "other" / "model.gguf", kind=Kind.Q8_0, **options)
    shutil.copy(tmp_path / "other" / parts[2].name, parts[2])
    assert "that is of another model: its split.tensors.count is 20, not 21" in failure(parts[0], cache)


def test_a_count_of_tensors_that_is_wrong_in_all_parts_is_refused(parts, cache):
    for part in parts:
        entry = b"split.tensors.count" + (5).to_bytes(4, "little")
        content = part.read_bytes()
        assert content.count(entry + (21).to_bytes(4, "little")) == 1
        part.write_bytes(content.replace(entry + (21).to_bytes(4, "little"), entry + (22).to_bytes(4, "little")))
    assert failure(parts[0], cache).startswith("has 21 tensors in its parts, its split.tensors.count is 22; copy or")


def test_a_later_part_or_parts_with_other_names_are_refused(parts, cache):
    assert failure(parts[1], cache) == "is part 2 of 4; name the first one, model-00001-of-00004.gguf"
    alone = parts[0].rename(parts[0].with_name("model.gguf"))
    assert failure(alone, cache).startswith("is part 1 of 4, and its name does not say where the others are; give the")
    alone.rename(parts[0])
    _rename(parts, parts[0])
    first = parts[0].with_name("model-00001-of-00005.gguf")
    assert failure(first, cache).startswith("is part 1 of 4, and its name does not say where the others are")


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_counts_that_are_no_numbers_are_refused(folder, tmp_path, cache, key):
    general = {"split.no": 0, "split.count": 2, "split.tensors.count": 21, key: "two"}
    file = write_gguf(folder, tmp_path / "model-00001-of-00002.gguf", general=general)
    assert failure(file, cache).startswith(f"is damaged: its {key} is two; copy or download it again")
    general = {name: value for name, value in general.items() if name != key}
    if key != "split.count":
        file = write_gguf(folder, tmp_path / "model-00001-of-00002.gguf", general=general)
        assert failure(file, cache).startswith(f"is damaged: its {key} is missing; copy or download it again")


# ---- on the hub -----------------------------------------------------------------------------------------------------


def test_all_parts_are_fetched_by_the_name_of_the_first(whole, parts, cache, monkeypatch):
    asked: list[str] = []

    def give(repository: str, file: str, **options: object) -> str:
        asked.append(file)
        return str(parts[0].with_name(Path(file).name))

    def about(files: Sequence[str]) -> ModelInfo:
        return ModelInfo(id="org/repo", siblings=[{"rfilename": file} for file in files])

    there = [f"sub/{part.name}" for part in parts]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: about(there))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", give)
    assert isinstance(about(there).siblings[0], RepoSibling)
    assert torch.equal(logits(Path(f"org/repo/{there[0]}"), cache), logits(whole, cache))
    assert asked == there
    with pytest.raises(ModelError, match=r"is a later part of a model; name its first one, org/repo/sub/model-00001-"):
        fetch("org/repo/sub/model-00002-of-00004.gguf", "org/repo", there[1])
    del there[2], asked[:]
    words = r"^org/repo has no file sub/model-00003-of-00004.gguf; it has sub/model-00001-of-00004.gguf$"
    with pytest.raises(ModelError, match=words):
        load_decoder("org/repo/sub/model-00001-of-00004.gguf", cache_dir=cache)
    assert not asked
