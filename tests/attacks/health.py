"""What a process beside a server sees of its health while somebody attacks.

An answer's wall time says little on a machine that others use as well. What the server's process computed between
question and answer does not grow with their work: that is what is bounded, and the table has both.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.server.running import PATIENCE_S, Command
from tests.waiting import until


class Look(NamedTuple):
    """One answer of /health."""

    started_at: float  # seconds of the monotonic clock
    took_s: float
    held_s: float  # what the server's process computed meanwhile, on all its threads
    rss: int  # its resident bytes then


def told(looks: list[Look]) -> str:
    """Return the longest answer in words."""
    took_s, held_s = max(look.took_s for look in looks), max(look.held_s for look in looks)
    return f"/health at most {took_s:.2f} s, of which the server computed {held_s:.2f} s"


@contextlib.contextmanager
def looking_at_health(server: Command, address: str = "127.0.0.1") -> Iterator[list[Look]]:
    """Ask for the server's health until the end, from this address; each question must be answered."""
    host, port = server.url.removeprefix("http://").split(":")
    script = Path(__file__).with_name("probe.py")
    words = [host, port, str(server.process.pid), address, str(PATIENCE_S)]
    probe = subprocess.Popen([sys.executable, script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert probe.stdin is not None and probe.stdout is not None
    looks: list[Look] = []

    def read() -> None:
        for line in probe.stdout or ():
            started_at, took_s, held_s, rss = line.split()
            looks.append(Look(float(started_at), float(took_s), float(held_s), int(rss)))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        until(lambda: len(looks) >= 20 or probe.poll() is not None)
        yield looks
        assert probe.poll() is None, "it was answered to the end"
    finally:
        probe.stdin.close()
        assert probe.wait(PATIENCE_S) == 0
        thread.join(PATIENCE_S)
