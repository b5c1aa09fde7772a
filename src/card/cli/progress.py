"""A spinner with words on standard error for whatever takes longer than a second, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")
Say = Callable[[str], None]  # takes what is being done now, such as "loading demo-target"


@contextmanager
def spinner(words: str) -> Iterator[Say]:
    """Spin until the block ends; yields what changes the words. Writes nothing unless standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _say_nothing
        return
    console = import_module("rich.console").Console(stderr=True)  # rich only where it draws: importing it takes a while
    escape = import_module("rich.markup").escape
    with console.status(escape(words)) as status:
        yield lambda words: status.update(escape(words))


def spin_until_first(items: Iterator[T], words: str) -> Generator[T, None, None]:
    """Yield the items; spin until the first one is there."""
    with spinner(words):
        first = next(items)
    yield first
    yield from items


def _say_nothing(_: str) -> None:
    pass
