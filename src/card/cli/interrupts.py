"""Ctrl-C: at any moment, exit status 130 and never a traceback.

While nothing needs closing, as during imports, the process ends at once. Otherwise KeyboardInterrupt ends it.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, what shells expect
_CLEAN_LINE = b"\r\x1b[2K\x1b[?25h"  # clear the line and show the cursor, as a spinner may have used both

_Handler = Callable[[int, FrameType | None], object]


def leave(_: int = 0, __: FrameType | None = None) -> None:
    """End the process now, without cleaning up after imports."""
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _CLEAN_LINE)
    os._exit(INTERRUPTED)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Within the block Ctrl-C ends the process at once: an interrupted import may print a traceback, or continue."""
    with _handled_by(leave):
        yield


@contextmanager
def raising() -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt, even in a callback, where Python would only print it."""
    hook = sys.unraisablehook

    def raise_again(caught: sys.UnraisableHookArgs) -> None:
        if issubclass(caught.exc_type, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            hook(caught)

    sys.unraisablehook = raise_again
    try:
        with _handled_by(signal.default_int_handler):
            yield
    finally:
        sys.unraisablehook = hook


@contextmanager
def noting_interrupts() -> Iterator[Event]:
    """Within the block the first Ctrl-C only sets an event, so that a round can finish; the next one raises."""
    note = Event()

    def take(number: int, frame: FrameType | None) -> None:
        if note.is_set():
            signal.default_int_handler(number, frame)
        note.set()

    with _handled_by(take):
        yield note


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error comes from Ctrl-C, even if a library has wrapped it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _handled_by(handler: _Handler) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    is_heard = callable(before)  # else the shell started us with interrupts ignored
    if is_heard:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, before)
