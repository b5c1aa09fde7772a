"""The texts of a request whose answer is not streamed: its place is free at the end, whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from card.api.outputs import StreamChunk
from card.engine.metrics import RequestStats
from card.errors import WorkerError
from card.server.errors import ApiError
from card.server.generation import Choice, Generation
from card.server.metrics import Ledger

LAST = StreamChunk("a", (1,), "length", RequestStats(num_new_tokens=1))


class Stream:
    """Gives a last chunk, fails, or waits for good."""

    def __init__(self, end: StreamChunk | Exception | None) -> None:
        self.is_read, self.is_left, self.is_closed, self._end = asyncio.Event(), False, False, end

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        self.is_read.set()
        if self._end is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.is_left = True
        if isinstance(self._end, Exception):
            raise self._end
        assert self._end is not None
        yield self._end

    async def aclose(self) -> None:
        assert self._end is not None or self.is_left, "it is read while it is closed"
        self.is_closed = True


@pytest.mark.parametrize(
    ("ends", "error", "reasons"),
    [
        ([LAST, LAST], None, ["length", "length"]),
        ([LAST, WorkerError("it broke")], WorkerError, ["length", "error"]),
        ([LAST, KeyError("a fault of ours")], KeyError, ["length", "abort"]),
        ([LAST, None], ApiError, ["length", "abort"]),
        ([None], ApiError, ["abort"]),
    ],
    ids=["finished", "failed", "broken", "left", "left alone"],
)
def test_a_collected_answer_gives_its_place_back_whatever_ends_it(
    ends: list[StreamChunk | Exception | None], error: type[Exception] | None, reasons: list[str]
) -> None:
    async def ask() -> None:
        ledger, left = Ledger(), list[object]()
        streams: list[Any] = [Stream(end) for end in ends]

        async def receive() -> dict[str, str]:
            for stream in streams:
                await stream.is_read.wait()
            if error is not ApiError:
                await asyncio.Event().wait()  # the client stays
            return {"type": "http.disconnect"}

        choices = [Choice(idx, (1,), stream, ledger.begin(1, speculates=True)) for idx, stream in enumerate(streams)]
        service: Any = SimpleNamespace(
            settings=SimpleNamespace(ping_interval_s=0.0), ledger=ledger, gate=SimpleNamespace(leave=left.append)
        )
        arrival: Any = SimpleNamespace(deadline=SimpleNamespace(begin_answer=lambda: None))
        generation = Generation(service, arrival, "ticket", SimpleNamespace(n=1), choices)  # type: ignore[arg-type]
        request: Any = SimpleNamespace(receive=receive)
        async with asyncio.timeout(20):  # a fault that nobody is told of would leave it waiting
            if error is None:
                await generation.collect(request)
                assert [choice.text for choice in choices] == ["a"] * len(choices)
            else:
                with pytest.raises(error):
                    await generation.collect(request)
        for _ in range(9):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing goes on reading"
        await generation.close()  # as a handler does that failed, too
        assert left == ["ticket"] and all(stream.is_closed for stream in streams)
        assert sum(ledger.finished.values()) == len(streams)
        assert [choice.record.finish_reason for choice in choices] == reasons

    asyncio.run(ask())
