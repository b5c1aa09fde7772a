"""A stream that has nothing to say yet says so, before its reader or a proxy gives up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from card.server.streaming import with_pings
from tests.server.running import Running, serving

COMMENT = b":\n\n"


async def collected(pieces: list[bytes], interval_s: float, num_pings: int) -> list[bytes]:
    """Return what a reader gets of a stream whose first piece waits until so many comments came."""
    enough = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        if num_pings:
            await enough.wait()
        for piece in pieces:
            yield piece

    got: list[bytes] = []
    async for piece in with_pings(events(), interval_s):
        got.append(piece)
        if got.count(COMMENT) == num_pings:
            enough.set()
    return got


def test_comments_come_while_nothing_else_does() -> None:
    assert asyncio.run(collected([b"a", b"b"], 0.001, 3))[:3] == [COMMENT] * 3
    assert [one for one in asyncio.run(collected([b"a", b"b"], 0.001, 3)) if one != COMMENT] == [b"a", b"b"]


def test_without_an_interval_no_comment_comes() -> None:
    assert asyncio.run(collected([b"a", b"b"], 0.0, 0)) == [b"a", b"b"]


def test_a_failure_of_the_stream_arrives_and_a_reader_that_leaves_ends_it() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise ValueError("broken")

    is_closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            is_closed.set()

    async def leave() -> None:
        task = asyncio.ensure_future(anext(with_pings(endless(), 0.0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_closed.is_set()

    async def read() -> list[bytes]:
        return [piece async for piece in with_pings(failing(), 0.0)]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())
    asyncio.run(leave())


def test_a_stream_with_pings_has_the_events_of_one_without(server: Running) -> None:
    assert server.service.settings.ping_interval_s == 5.0
    body = {"prompt": "one two", "max_tokens": 6, "temperature": 0, "stream": True}
    lines = server.post("/v1/completions", body).text.split("\n\n")
    assert lines[-2] == "data: [DONE]" and all(line.startswith(("data: ", ":")) or not line for line in lines)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_how_far_its_prompt_is_read_if_asked(server: Running, path: str) -> None:
    text = "A farmer has 12 cows. " * 80
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    asked = {**prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    with serving(server.llm, ping_interval_s=1e-4) as restless:
        told = restless.post(path, asked | {"return_progress": True}).text
        silent = restless.post(path, asked).text
    found = [json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: {")]
    progress = [one["prompt_progress"] for one in found if "prompt_progress" in one]
    assert progress and "prompt_progress" not in silent
    assert all(0 <= one["cache"] <= one["processed"] <= one["total"] for one in progress)
    assert [one["processed"] for one in progress] == sorted(one["processed"] for one in progress)
    assert "prompt_progress" not in found[-1], "an answer has begun by then"
