"""Rows of beginnings in files: which ones, the same bits after a restart, and never rows that moved meanwhile."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from card.assembly.prefixes import prefix_cache
from card.config import EngineSettings
from card.errors import SettingsError
from card.kernels.int8_linear import why_not_int8
from card.models.demo import DEMO_NAMES, demo_folder
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.rows import prefix_cache as module
from card.models.rows.parts import RowsPart
from card.models.rows.pool import SequencePool
from card.models.rows.prefix_cache import PrefixCache
from card.models.rows.prefix_files import BLOCK_ROWS, PrefixFiles
from card.models.runner import ExactRunner, RowRunner
from card.models.runners import plain_runner
from tests.models import test_records, test_states
from tests.reaching_in import retained_slot, space_landmarks
from tests.tiny import LONG_ROPE, tiny_llama
from tests.waiting import until

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here"),
]
V = 61
TEXT = [(7 * i * i + 3 * i) % V for i in range(400)]
OTHER = [(5 * i + 3) % V for i in range(400)]


@functools.cache
def model_of(**changes: Any) -> PreTrainedModel:
    return tiny_llama(V, max_position_embeddings=512, **changes)


def runner_of(**changes: Any) -> ExactRunner:
    runner = plain_runner(tiny_llama(V, max_position_embeddings=512, **changes), max_model_len=512)
    assert isinstance(runner, ExactRunner)
    return runner


class Process:
    """What one process has: a runner, its pool, and the files of a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        num_rows: int = 4096,
        most_bytes: int = 1 << 30,
        runner: ExactRunner | None = None,
        **changes: Any,
    ) -> None:
        self.runner = runner or runner_of(**changes)
        self.files = PrefixFiles(folder, b"m" * 32, self.runner, most_bytes=most_bytes)
        self.cache = PrefixCache(self.runner, self.files)
        self.pool = SequencePool(self.runner, num_rows * self.runner.row_bytes, prefixes=self.cache)

    def run(self, text: Sequence[int]) -> np.ndarray[Any, Any]:
        """Read a text, retain it, and return the logits of its last token."""
        opened = self.pool.open(text, len(text))
        start = opened.num_reused
        new = Extension(opened.slot, text[start:], range(start - 1, len(text) - 1), len(text) - start - 1)
        logits = np.array(self.runner.forward([new])[0][0])
        self.pool.close(opened.slot, text)
        return logits


@pytest.fixture(autouse=True)
def short_texts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_TOKENS", 100)
    monkeypatch.setattr(module, "LONG_TOKENS", 200)
    monkeypatch.setattr(module, "CLOSE_S", 100.0)  # a busy machine may not give its thread a block a second


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.rows"))


@pytest.mark.parametrize("num_shared", [100, 256, 300, 399])
@pytest.mark.parametrize("rope", [{}, {"rope_parameters": LONG_ROPE}], ids=["plain", "longrope"])
def test_a_restart_goes_on_behind_what_it_knows_with_the_same_bits(
    tmp_path: Path, num_shared: int, rope: dict[str, Any]
) -> None:
    first = Process(tmp_path, **rope)
    first.run(TEXT)
    first.pool.close_prefixes()
    (file,) = kept(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    again, plain = Process(tmp_path, **rope), Process(tmp_path / "empty", **rope)
    text = TEXT[:num_shared] + OTHER[: 420 - num_shared]
    assert np.array_equal(again.run(text), plain.run(text))
    assert again.pool.stats.read_tokens == again.pool.stats.reused_tokens == num_shared
    assert plain.pool.stats.read_tokens == 0
    slots = [retained_slot(one.pool, len(text)) for one in (again, plain)]
    rows = [one.runner.read_rows(slot) for one, slot in zip((again, plain), slots, strict=True)]
    assert np.array_equal(*rows)


def test_the_beginning_of_two_texts_is_kept_while_the_server_runs(tmp_path: Path) -> None:
    one = Process(tmp_path)
    one.run(TEXT[:150] + OTHER[:20])
    one.run(TEXT[:99] + OTHER[:20])  # they share 99 tokens: too few
    assert not kept(tmp_path)
    one.run(TEXT[:150] + OTHER[30:50])
    until(lambda: kept(tmp_path))
    other = Process(tmp_path)
    other.run(TEXT)
    assert other.pool.stats.read_tokens == 150
    assert other.run(TEXT[:300]) is not None and other.pool.stats.read_tokens == 150, "memory holds more than the file"


def test_a_growing_conversation_is_not_written_at_each_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, lengths = Process(tmp_path), list[int]()
    written = one.files.written

    def counted(text: Any, *, is_long: bool) -> Any:
        lengths.append(len(text))
        return written(text, is_long=is_long)

    monkeypatch.setattr(one.files, "written", counted)
    for length in range(100, 400, 5):
        one.run(TEXT[:length])
    one.pool.close_prefixes()
    assert 1 <= len(lengths) <= 7 and len(kept(tmp_path)) == 1


def test_a_text_that_is_about_to_be_dropped_is_kept(tmp_path: Path) -> None:
    one = Process(tmp_path, num_rows=1000)
    one.run(TEXT[:250])
    one.run(OTHER[:300])  # now the pool is half full
    until(lambda: kept(tmp_path))
    other = Process(tmp_path)
    other.run(TEXT)
    assert other.pool.stats.read_tokens == 250


def test_short_texts_and_those_that_are_kept_are_not_written_at_the_end(tmp_path: Path) -> None:
    one = Process(tmp_path)
    one.run(TEXT[:199])
    one.pool.close_prefixes()
    assert not kept(tmp_path)
    two = Process(tmp_path)
    two.run(TEXT[:300])
    two.pool.close_prefixes()
    (file,) = kept(tmp_path)
    was = file.stat()
    three = Process(tmp_path)
    three.run(TEXT[:300] + OTHER[:50])
    three.pool.close_prefixes()
    three.pool.close_prefixes()
    assert [one.stat().st_ino for one in kept(tmp_path)] == [was.st_ino]


def test_rows_that_move_while_they_are_copied_are_copied_again_or_left(tmp_path: Path) -> None:
    """The thread copies beside the passes: whatever happens then, no file may hold rows of another text."""
    one = Process(tmp_path)
    one.run(TEXT[:200])
    read_part, num_calls = one.runner.read_part, 0

    def disturbed(slot: int, part: RowsPart) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # the rows go, and others are in their memory before they are copied
            one.pool.clear()
            one.run(OTHER[:201])
            one.run(TEXT[:200])
            slot = retained_slot(one.pool, 201)
        return read_part(slot, part)

    one.runner.read_part = disturbed  # type: ignore[method-assign]
    one.pool.close_prefixes()
    assert num_calls > 200 // BLOCK_ROWS + 1, "a block was copied again"
    again, plain = Process(tmp_path), Process(tmp_path / "empty")
    text = TEXT[:200] + OTHER[:50]
    assert np.array_equal(again.run(text), plain.run(text))
    assert again.pool.stats.read_tokens == 200


def test_rows_that_are_gone_leave_no_file(tmp_path: Path) -> None:
    one = Process(tmp_path)
    one.run(TEXT[:200])
    read_part = one.runner.read_part

    def gone(slot: int, part: RowsPart) -> Any:
        one.pool.clear()
        return read_part(slot, part)

    one.runner.read_part = gone  # type: ignore[method-assign]
    one.pool.close_prefixes()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_damaged_file_costs_a_line_and_the_text_is_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Process(tmp_path)
    first.run(TEXT)
    first.pool.close_prefixes()
    (file,) = kept(tmp_path)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    again, plain = Process(tmp_path), Process(tmp_path / "empty")
    again.run(OTHER[:100])
    text = TEXT + OTHER[:20]
    assert np.array_equal(again.run(text), plain.run(text))
    assert again.pool.stats.read_tokens == 0 and again.pool.stats.num_open == 0
    assert [record.getMessage() for record in caplog.records if "left aside" in record.getMessage()]
    again.pool.close_prefixes()
    assert Process(tmp_path).run(text) is not None and len(kept(tmp_path)) == 2


def test_a_full_disk_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Process(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    for text in (TEXT[:300], OTHER[:300]):
        one.run(text)
    one.pool.close_prefixes()
    assert not kept(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not kept" in line and "no room" in line


def test_where_images_are_only_what_is_before_them_is_kept(tmp_path: Path) -> None:
    one, key = Process(tmp_path), [*TEXT[:250], V + 2**40, *TEXT[251:300]]
    opened = one.pool.open(key, 300)
    one.runner.forward([Extension.of_text(opened.slot, TEXT[:300])])
    one.pool.close(opened.slot, key)
    one.pool.close_prefixes()
    other = Process(tmp_path)
    other.run(TEXT)
    assert other.pool.stats.read_tokens == 250


HYBRIDS = [pytest.param(test_states, id="states"), pytest.param(test_records, id="convolutions")]


@pytest.fixture
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let texts of hybrids, which have 150 tokens here, be kept, and landmarks be 32 rows apart."""
    monkeypatch.setattr(module, "SHARED_TOKENS", 60)
    monkeypatch.setattr(module, "LONG_TOKENS", 80)
    monkeypatch.setattr(module, "WORTH_READING", 16)
    space_landmarks(monkeypatch, 32)


@pytest.mark.usefixtures("short_beginnings")
@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("num_shared", [70, 131])
def test_hybrids_go_on_behind_landmarks_and_ends_of_files_with_the_same_bits(
    tmp_path: Path, kind: ModuleType, num_shared: int
) -> None:
    first = Process(tmp_path, runner=kind.make_runner())
    first.run(kind.TEXT[:131])
    first.pool.close_prefixes()
    (file,) = kept(tmp_path)
    again, plain = Process(tmp_path, runner=kind.make_runner()), Process(tmp_path / "empty", runner=kind.make_runner())
    text = [*kind.TEXT[:num_shared], *kind.TEXT[: 160 - num_shared]]
    assert np.array_equal(again.run(text), plain.run(text))
    at_end = 131 - (kind is test_states)  # the state behind the last token was never needed
    assert again.pool.stats.read_tokens == {70: 64, 131: at_end}[num_shared]
    slots = [retained_slot(one.pool, len(text)) for one in (again, plain)]
    rows = [one.runner.lendable_rows(slot, 160) for one, slot in zip((again, plain), slots, strict=True)]
    assert rows[0] == rows[1]
    content = bytearray(file.read_bytes())
    content[-5] ^= 1  # in what the text goes on from
    file.write_bytes(content)
    damaged = Process(tmp_path, runner=kind.make_runner())
    assert np.array_equal(damaged.run(text), plain.run(text))
    assert damaged.pool.stats.read_tokens == {70: 64, 131: 0}[num_shared]


@pytest.mark.usefixtures("short_beginnings")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_beginning_that_two_texts_of_a_hybrid_share_is_kept_with_a_record_at_its_end(
    tmp_path: Path, kind: ModuleType
) -> None:
    one = Process(tmp_path, runner=kind.make_runner())
    one.run(kind.TEXT[:75])
    one.run([*kind.TEXT[:75], 1, 2, 3])
    until(lambda: kept(tmp_path))
    other = Process(tmp_path, runner=kind.make_runner())
    text = [*kind.TEXT[:75], 7, 8, 9]
    assert np.array_equal(other.run(text), Process(tmp_path / "empty", runner=kind.make_runner()).run(text))
    assert other.pool.stats.read_tokens == 75 - (kind is test_states)


def settings_of(folder: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(target="demo-target", prefix_cache=str(folder), **changes)


def demo_runner(dtype: str = "auto") -> RowRunner:
    return plain_runner(load_decoder("demo-target", dtype=dtype), max_model_len=64)


def test_rows_are_of_one_model_in_one_dtype(tmp_path: Path) -> None:
    for dtype in ("float32", "int8", "float32"):
        assert prefix_cache(settings_of(tmp_path, dtype=dtype), demo_runner(dtype), is_named=True) is not None
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_weights_that_have_changed_are_another_model(tmp_path: Path) -> None:
    folder, model = tmp_path / "cache", tmp_path / "model"
    shutil.copytree(demo_folder(DEMO_NAMES["demo-target"]), model)
    settings = EngineSettings(target=str(model), prefix_cache=str(folder))
    runner = demo_runner()
    prefix_cache(settings, runner, is_named=True)
    copied = tmp_path / "copied"
    shutil.copytree(model, copied)
    prefix_cache(settings.replace(target=str(copied)), runner, is_named=True)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1, "a copy is the same model"
    (weights,) = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    prefix_cache(settings, runner, is_named=True)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "x")
    hybrid = plain_runner(test_states.model_of(), max_model_len=64)
    assert prefix_cache(settings, hybrid, is_named=True) is not None
    with pytest.raises(SettingsError, match="own pass"):
        prefix_cache(settings, plain_runner(model_of(), max_model_len=64, own_pass=False), is_named=True)
    with pytest.raises(SettingsError, match="give its name"):
        prefix_cache(settings, demo_runner(), is_named=False)
    with pytest.raises(SettingsError, match="prefix_cache_size"):
        EngineSettings(prefix_cache_size="1GiB")
    with pytest.raises(SettingsError, match="prefix_cache_size must be a number of bytes"):
        settings_of(tmp_path, prefix_cache_size="much")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(SettingsError, match="others can write"):
        prefix_cache(settings_of(open_to_all), demo_runner(), is_named=True)
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="must name a folder"):
        prefix_cache(settings_of(tmp_path / "file"), demo_runner(), is_named=True)
    assert prefix_cache(EngineSettings(), demo_runner(), is_named=False) is None
