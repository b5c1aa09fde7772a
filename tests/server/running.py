"""Real servers for tests: the application in a thread of this process, or the command in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from card.api.async_llm import AsyncLLM
from card.server.accepting import Server
from card.server.app import make_app
from card.server.config import ServerSettings
from card.server.connections import ServerConfig
from card.server.listening import bind
from card.server.service import Service
from tests.waiting import PATIENCE_S, until

PROMPT = "A farmer has 12 cows and 30 sheep. He sells"
MAX_QUEUED = 64  # requests that the shared server lets wait

Solo = Callable[..., str]
"""(prompt, max_tokens, other sampling parameters) -> what plain decoding writes when nobody else asks."""


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    llm: AsyncLLM
    service: Service
    client: httpx2.Client
    connections: Collection[Any]  # that are open

    def post(self, path: str, body: object = None, **options: Any) -> httpx2.Response:
        """Post JSON, or bytes as they are."""
        if isinstance(body, bytes):
            headers = {"Content-Type": "application/json", **options.pop("headers", {})}
            return self.client.post(path, content=body, headers=headers, **options)
        return self.client.post(path, json=body, **options)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Return the answer to a completion request that must succeed."""
        response = self.post("/v1/completions", fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def text(self, **fields: Any) -> str:
        """Return the text of a completion."""
        return str(self.complete(**fields)["choices"][0]["text"])

    def is_idle(self) -> bool:
        """Whether nothing is left of any request."""
        stats = self.llm.stats()
        is_empty = not self.service.gate.num_requests and not len(self.service.arrivals)
        return is_empty and not (stats.num_running + stats.num_waiting + stats.kv_open_sequences)


def scraped(server: Running) -> dict[tuple[str, str], float]:
    """Return the value of each sample of `/metrics` by its name and its own labels, joined by spaces."""
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "demo-target"
            sample.labels.pop("engine")
            key = (sample.name, " ".join(sample.labels.values()))
            assert key not in values, "no sample is told of twice"
            values[key] = sample.value
    return values


@contextlib.contextmanager
def serving(llm: AsyncLLM, **settings: Any) -> Iterator[Running]:
    """Serve a model in a thread; the model is the caller's to shut down."""
    own = ServerSettings(**{"port": 0, "served_model_names": ("demo-target",), **settings})
    sock = bind(own)
    app = make_app(llm, own)
    server = Server(ServerConfig(app, own))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="server", daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield Running(url, llm, app.state.service, client, server.server_state.connections)
    server.should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@dataclass
class Streamed:
    """What a client read of one stream."""

    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False  # [DONE] came, and last
    error: dict[str, Any] | None = None

    @property
    def finish_reason(self) -> str | None:
        """The one of the first choice."""
        reasons = [c["finish_reason"] for e in self.events for c in e["choices"] if c["finish_reason"]]
        return reasons[0] if reasons else None


async def sse(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the data of each event; anything else is an error, but for the comments that fill a long silence."""
    async for line in lines:
        if line and line != ":":
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


async def stream(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> Streamed:
    """Read a whole stream of a completion or chat completion."""
    read = Streamed()
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for data in sse(response.aiter_lines()):
            assert not read.is_done, "nothing comes after [DONE]"
            if data == "[DONE]":
                read.is_done = True
                continue
            content = json.loads(data)
            if "error" in content:
                read.error = content["error"]
                continue
            read.events.append(content)
            for choice in content["choices"]:
                read.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return read


def run(coroutine: Any) -> Any:
    """Run a coroutine; nothing in here may hang."""
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


def streams(url: str, path: str, bodies: list[dict[str, Any]]) -> list[Streamed]:
    """Read several streams at once."""

    async def main() -> list[Streamed]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
            return list(await asyncio.gather(*(stream(client, path, body) for body in bodies)))

    return list(run(main()))


@dataclass
class Command:
    """`card serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def logged(self) -> list[dict[str, Any]]:
        """Return the lines of the log; each must be JSON."""
        return [json.loads(line) for line in self.log.read_text("utf-8").splitlines()]


@contextlib.contextmanager
def command(
    folder: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    before: str = "pass",
    root: Path = Path(__file__).parents[2] / "src",
) -> Iterator[Command]:
    """Run the command of the package at ``root`` until it is ready; the process runs the code ``before`` it."""
    code = f"import sys; from card.cli import main; sys.argv[0] = 'card'; {before}; main()"
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = folder / "log"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--port", "0", *arguments],
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"ready on (http://\S+:[1-9]\d*)$", line)
        assert found, line + log.read_text("utf-8")
        yield Command(process, found[1], log)
    finally:
        process.kill()
        process.communicate()
