"""A process of its own: asks a server's /health every 20 ms and writes a line for each answer, until its input ends.

    python probe.py HOST PORT PID

A line has the time of the monotonic clock, the seconds that the answer took, and the server's resident bytes.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time

import psutil

PERIOD_S = 0.02


def main(host: str, port: int, pid: int) -> None:
    """Ask until the standard input is closed."""
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    process = psutil.Process(pid)
    connection = http.client.HTTPConnection(host, port, timeout=60)
    while not is_over.is_set():
        started_at = time.monotonic()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        took_s = time.monotonic() - started_at
        assert answer.status == 200, answer.status
        print(started_at, took_s, process.memory_info().rss, flush=True)
        time.sleep(max(0.0, PERIOD_S - took_s))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
