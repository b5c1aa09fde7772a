"""Waiting beside the event loop: only while the client is connected, or for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.requests import Request

from card.server.errors import ApiError

T = TypeVar("T")
_GONE = 499  # status in the log if the client did not wait for the answer; nginx uses the same


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it if the client disconnects meanwhile.

    Raises: ApiError then, for the log only; any error of ``work``.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(_GONE, "the client has hung up", code="client_gone")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def end_of(work: Future[Any], seconds: float) -> None:
    """Wait until work is done, at most ``seconds``."""
    loop, is_done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(is_done.set)

    work.add_done_callback(tell)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(is_done.wait(), seconds)
