"""A server that starts again answers from rows of its folder: the text of plain decoding, fewer tokens read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from card.api.async_llm import AsyncLLM
from card.kernels.int8_linear import why_not_int8
from card.models.rows import prefix_cache
from tests.server.running import Running, Solo, scraped, serving

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(why_not_int8() is not None, reason="no exact passes here"),
]
SYSTEM = "You solve word problems step by step, and name each number before you use it. " * 12
FIRST, SECOND = SYSTEM + "A farmer has 12 cows and 30 sheep.", SYSTEM + "Ann buys 5 pens and sells 2 of them."


@contextlib.contextmanager
def started(folder: Path, **settings: Any) -> Iterator[Running]:
    """Serve the demo pair with a folder for rows, from the start of the engine to its end."""
    llm = AsyncLLM("demo-target", "demo-draft", dtype="float32", prefix_cache=str(folder), **settings)
    try:
        with serving(llm) as server:
            yield server
    finally:
        asyncio.run(llm.shutdown())


def answered(server: Running, prompt: str) -> tuple[str, int]:
    """Return the text of an answer, and how many tokens of the prompt had their rows."""
    answer = server.complete(prompt=prompt, max_tokens=24, temperature=0, seed=0)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_read(server: Running) -> float:
    return scraped(server)["card_prefix_cache_read_tokens_total", ""]


@pytest.mark.parametrize("schedule", ["turns", "beside"])
def test_a_restart_answers_its_first_turn_after_its_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solo: Solo, schedule: str
) -> None:
    monkeypatch.setattr(prefix_cache, "LONG_TOKENS", 128)
    with started(tmp_path, schedule=schedule) as server:
        assert answered(server, FIRST) == (solo(FIRST, 24), 0)
        assert num_read(server) == 0
    with started(tmp_path, schedule=schedule) as server:
        text, num_cached = answered(server, SECOND)
        assert text == solo(SECOND, 24)
        assert num_cached > 128 and num_read(server) == num_cached
        assert answered(server, SECOND)[0] == solo(SECOND, 24)
        assert num_read(server) == num_cached, "memory holds them now"


def test_two_servers_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solo: Solo) -> None:
    monkeypatch.setattr(prefix_cache, "LONG_TOKENS", 128)
    with started(tmp_path) as other:
        with started(tmp_path) as server:
            answered(server, FIRST)
        text, num_cached = answered(other, SECOND)
        assert text == solo(SECOND, 24) and num_cached == num_read(other) > 128


def test_a_damaged_file_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solo: Solo, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefix_cache, "LONG_TOKENS", 128)
    with started(tmp_path) as server:
        answered(server, FIRST)
    (file,) = tmp_path.glob("*/*.rows")
    file.write_bytes(file.read_bytes()[:-1000])
    with started(tmp_path) as server:
        assert answered(server, SECOND) == (solo(SECOND, 24), 0)
        assert num_read(server) == 0
    assert sum("left aside" in record.getMessage() for record in caplog.records) == 1
