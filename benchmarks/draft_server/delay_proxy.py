"""A TCP proxy that forwards bytes after a delay each way: a distant draft server on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class DelayProxy:
    """Listens on a free port of 127.0.0.1 while it is entered, and forwards each connection to ``port`` there.

        with DelayProxy(server_port, one_way_s=0.01) as proxy:
            connect_to(proxy.address)

    Bytes keep their order and their distance in time; bandwidth is not limited.
    """

    def __init__(self, port: int, *, one_way_s: float) -> None:
        self._port, self._one_way_s = port, one_way_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay-proxy", daemon=True)

    @property
    def address(self) -> str:
        """What to connect to instead of the server."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"tcp://{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Break all connections, as a router does that forgets them."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    async def _end(self) -> None:
        self._server.close()
        await self._cut()

    async def _cut(self) -> None:
        ours = asyncio.all_tasks() - {asyncio.current_task()}
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._forward(reader, server_writer), self._forward(server_reader, writer))
        for end in (writer, server_writer):
            end.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Write what is read, each piece ``one_way_s`` after it came."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def take() -> None:
            data = b"any"
            while data:
                data = await reader.read(_CHUNK_BYTES)
                on_the_way.put_nowait((self._loop.time() + self._one_way_s, data))

        async def deliver() -> None:
            data = b"any"
            while data:
                due, data = await on_the_way.get()
                await asyncio.sleep(due - self._loop.time())
                writer.write(data)
                await writer.drain()
            writer.close()

        await asyncio.gather(take(), deliver())
