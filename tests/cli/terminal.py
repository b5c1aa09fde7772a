"""A command on a terminal of its own: what a user types, Ctrl-C included, and what stands on the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from select import select
from time import monotonic
from typing import TextIO

from tests.commands import WIDE
from tests.waiting import PATIENCE_S

CTRL_C = "\x03"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A running command and all that it has written."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.raw = ""

    @property
    def text(self) -> str:
        """What was written, without control sequences."""
        return _CONTROL.sub("", self.raw).replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._master, keys.encode())

    def wait_for(self, *words: str, after: int = 0) -> int:
        """Read until one of these words stands behind position ``after`` of the text; return where it ends."""
        deadline, pattern = monotonic() + PATIENCE_S, re.compile("|".join(map(re.escape, words)))
        while (found := pattern.search(self.text, after)) is None:
            assert self._read(deadline - monotonic()), f"{words!r} never came:\n{self.text}"
        return found.end()

    def wait_for_text(self) -> None:
        """Read until something stands where a spinner was."""
        deadline = monotonic() + PATIENCE_S
        while not re.search(r"\x1b\[\?25h\r\x1b\[1A\x1b\[2K[^\x1b]", self.raw):
            assert self._read(deadline - monotonic()), self.text

    def wait(self) -> int:
        """Read to the end; return the exit status."""
        deadline = monotonic() + PATIENCE_S
        while self._read(deadline - monotonic()):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, seconds: float) -> bool:
        """Read what is there, and wait for it if need be. Returns: whether more may come."""
        ready, _, _ = select([self._master], [], [], max(0.0, seconds))
        assert ready, f"nothing came for {PATIENCE_S} s:\n{self.text}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says so of a terminal that nobody holds any more
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def screen() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Open a terminal without a command: a file to write to, and what returns all that was written so far."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    raw = b""

    def shown() -> str:
        nonlocal raw
        with contextlib.suppress(BlockingIOError):
            while data := os.read(master, 65536):
                raw += data
        return raw.decode()

    try:
        with open(slave, "w", encoding="utf-8") as file:
            yield file, shown
    finally:
        os.close(master)


@contextlib.contextmanager
def terminal(arguments: Sequence[str], *, columns: int = WIDE, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    """Run `card` with a terminal as standard input, output and error."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "card", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm", **(env or {})},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (so that Ctrl-C reaches it)
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
