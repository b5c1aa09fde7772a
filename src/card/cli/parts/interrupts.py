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
from threading import Event, main_thread
from time import sleep
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, what shells expect
_CLEAN_LINE = b"\r\x1b[2K\x1b[?25h"  # clear the line and show the cursor, as a spinner may have used both

_OUT_OF_CALLBACKS_S = 0.02  # how long a callback, such as one of the garbage collector's, may still run

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
    """Within the block Ctrl-C raises KeyboardInterrupt, even in a callback, where Python would only print it.

    What is raised within the hook that hears of it would be printed too, so another thread interrupts a moment later:
    again and again until the main thread is outside of callbacks, or at the block's end at the latest. It sends a real
    signal, which wakes a main thread that waits.
    """
    hook, is_owed = sys.unraisablehook, False  # no Event: a callback may run while its lock is held
    main_ident = main_thread().ident or 0

    def interrupt_later() -> None:
        sleep(_OUT_OF_CALLBACKS_S)
        if is_owed:
            signal.pthread_kill(main_ident, signal.SIGINT)

    def raise_again(caught: sys.UnraisableHookArgs) -> None:
        nonlocal is_owed
        if issubclass(caught.exc_type, KeyboardInterrupt):
            is_owed = True
            _thread.start_new_thread(interrupt_later, ())
        else:
            hook(caught)

    sys.unraisablehook = raise_again
    try:
        with _handled_by(signal.default_int_handler):
            yield
    except BaseException:  # the block ends by itself
        is_owed = False
        raise
    finally:
        sys.unraisablehook = hook
        # Interrupted within such a call, as in one of a dataclass, `python -m` ends with the signal whatever status we
        # exit with, unless a later call of this kind comes to its end.
        exec("")
    if is_owed:
        is_owed = False
        raise KeyboardInterrupt


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
