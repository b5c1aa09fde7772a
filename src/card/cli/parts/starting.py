"""The time until a command can work: spinner, imports, and the drafter's process, which imports meanwhile."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeVar

import click

from card.cli.parts.interrupts import leaving_at_once
from card.config.registry import find_method
from card.links.child import DrafterChild
from card.machine.container import cpu_quota, num_usable_cores
from card.machine.heartbeat import Heartbeat, write_line
from card.machine.importing import load_module

T = TypeVar("T")
Say = Callable[[str], None]  # shows the current step, such as "loading demo-target"


@contextmanager
def spinner(words: str, *, in_pipes: bool = False, write: Say = write_line) -> Iterator[Say]:
    """Spin until the block ends; yields a function that changes the words.

    If standard error is no terminal, a line with the words is written now and then (`Heartbeat`).

    Args:
        in_pipes: without a terminal, also write each change as a line.
        write: writes these lines.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        now = words

        def say(words: str) -> None:
            nonlocal now
            is_new, now = words != now, words
            if in_pipes and is_new:
                write(words)

        if in_pipes:
            write(words)
        with Heartbeat(lambda: now, write):
            yield say
        return
    console = import_module("rich.console").Console(stderr=True)  # only if it draws, as importing it takes a while
    escape = import_module("rich.markup").escape
    with console.status(escape(words)) as status:
        yield lambda words: status.update(escape(words))


def tell(words: str) -> None:
    """Write a line of ours to standard error; a closed one is ignored."""
    write_line(f"card: {words}")


class ReadingSpinner:
    """Spins until the first piece of an answer is there, and says how far the prompt is read meanwhile."""

    def __init__(self, words: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._words, self._clock = words, clock
        self.say: Say = lambda words: None
        self._first: tuple[int, float] | None = None  # tokens read by the first pass, and when

    def tell_read(self, num_read: int, num_all: int) -> None:
        """Take how many tokens are read, and how many there are, after a pass."""
        now = self._clock()
        if self._first is None:
            self._first = num_read, now
        num_since, seconds = num_read - self._first[0], now - self._first[1]
        rest = f", {math.ceil((num_all - num_read) * seconds / num_since)} s left" if num_since > 0 else ""
        self.say(f"{self._words}: {num_read:,} of {num_all:,} tokens{rest}")

    def until_first(self, items: Iterator[T]) -> Generator[T, None, None]:
        """Yield the items; spin until the first one is there."""
        with spinner(self._words) as self.say:
            first = next(items)
        yield first
        yield from items


# ---- imports ---------------------------------------------------------------------------------------------------------


_WORDS = "importing libraries"


def load(name: str, words: str = _WORDS, write: Say = write_line, *, what: str = "") -> Any:
    """Return a module, imported now if needed. Ctrl-C meanwhile ends the process at once.

    Args:
        words: for the spinner; empty: no spinner.
        write: as in `spinner`.
        what: needs it, in words; empty: the command.
    Raises: MissingError if it needs PyTorch, which is not installed.
    """
    if name in sys.modules:
        return import_module(name)
    _limit_threads()
    with leaving_at_once(), spinner(words, write=write) if words else nullcontext(), _garbage_left_alone():
        return load_module(name, what or _command_name())


def _command_name() -> str:
    """Return the running command as typed; empty if there is none."""
    context = click.get_current_context(silent=True)
    return "" if context is None else context.command_path


def _limit_threads() -> None:
    """Let libraries start no more threads than the container allows; by default they take all cores."""
    if (quota := cpu_quota()) is not None and quota < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(num_usable_cores()))


@contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Import without garbage collection, and never scan the imported objects: this saves a tenth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run(name: str, words: str = _WORDS, what: str = "", /, **options: Any) -> int:
    """Run a command: call this function of a module with the options; return the exit status.

    Args:
        words, what: as of `load`.
    """
    module, _, function = name.rpartition(".")
    status = getattr(load(module, words, what=what), function)(**options)
    return status if isinstance(status, int) else 0


# ---- the drafter's process -------------------------------------------------------------------------------------------


def start_drafter_child(method: str | None, draft: str | None, options: Mapping[str, Any]) -> DrafterChild | None:
    """Start a process for the drafter if these options need one; loading the models takes it over."""
    if method is None or draft is None or not _asks_for_a_process(method, options):
        return None
    try:
        return DrafterChild(options.get("draft_threads") or 1)
    except OSError:
        return None  # the drafter's link reports what is wrong


def _asks_for_a_process(method: str, options: Mapping[str, Any]) -> bool:
    """Return whether the drafter is surely a process, before any measurement; a drafter in turns is not."""
    chosen = find_method(method)
    is_beside = not chosen.is_tuned or options.get("schedule") == "beside" or options.get("policy") == "fixed"
    placement = options.get("placement") or (None if chosen.is_tuned else chosen.placement)
    devices = {options.get("device") or "cpu", options.get("draft_device") or "cpu"}
    writers = options.get("writers")
    return (
        (placement == "process" or (placement is None and is_beside))
        and options.get("schedule") != "turns"
        and options.get("draft_address") is None
        and devices == {"cpu"}
        and num_usable_cores() > (options.get("draft_threads") or 1)
        and (writers is None or "beam" in writers)
    )
