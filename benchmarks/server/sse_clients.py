"""The clients of `served.py`: a task in JSON on standard input, times and texts on standard output."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
_END = b"0\r\n\r\n"  # of a chunked answer


async def read_all(task: dict[str, Any]) -> tuple[float, list[bytes]]:
    """Read all streams, so many at a time over connections that stay open; return seconds and what came."""
    bodies = [json.dumps(body).encode() for body in task["bodies"]]
    answers = [b""] * len(bodies)
    waiting = iter(range(len(bodies)))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", task["port"])
        for idx in waiting:
            writer.write(_HEAD % len(bodies[idx]) + bodies[idx])
            parts = []
            while not parts or not parts[-1].endswith(_END):
                part = await reader.read(65536)
                if not part:
                    raise SystemExit("the server has closed the connection")
                parts.append(part)
            answers[idx] = b"".join(parts)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(task["concurrency"])))
    return time.perf_counter() - started, answers


def text_of(answer: bytes) -> str:
    """Return the text of a streamed answer as it came over the wire."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(answer.decode(errors="replace"))
    text = ""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    return text


def main() -> None:
    """Do the task."""
    task = json.load(sys.stdin)
    cpu_before = time.process_time()
    wall_s, answers = asyncio.run(read_all(task))
    cpu_s = time.process_time() - cpu_before
    json.dump({"wall_s": wall_s, "cpu_s": cpu_s, "texts": [text_of(answer) for answer in answers]}, sys.stdout)


if __name__ == "__main__":
    main()
