"""A process of its own: asks a server's /health every 20 ms and writes a line for each answer, until its input ends.

    python probe.py HOST PORT PID ADDRESS TIMEOUT_S

ADDRESS is where it asks from. A line has the time of the monotonic clock, the seconds that the answer took, the seconds
that the server's process computed meanwhile, and its resident bytes.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time

import psutil

PERIOD_S = 0.02


def seconds_computed(process: psutil.Process) -> float:
    """Return the processor's seconds that a process has used, in steps of 10 ms."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main(host: str, port: int, pid: int, address: str, timeout_s: float) -> None:
    """Ask until the standard input is closed."""
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    process = psutil.Process(pid)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s, source_address=(address, 0))
    while not is_over.is_set():
        started_at, computed_s = time.monotonic(), seconds_computed(process)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        took_s, held_s = time.monotonic() - started_at, seconds_computed(process) - computed_s
        assert answer.status == 200, answer.status
        print(started_at, took_s, held_s, process.memory_info().rss, flush=True)
        time.sleep(max(0.0, PERIOD_S - took_s))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
