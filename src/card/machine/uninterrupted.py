"""Work that Ctrl-C must not cut in two: KeyboardInterrupt comes to the main thread only, so another one does it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread, main_thread
from typing import TypeVar

_T = TypeVar("_T")


def uninterrupted(work: Callable[[], _T]) -> _T:
    """Do short work that comes to its end even if the caller is interrupted; Python's own end waits for it.

    llvmlite needs it: interrupted between freeing a string and forgetting it, it frees the string a second time, which
    aborts the process. Interrupted at its lock, it keeps the lock.
    """
    if current_thread() is not main_thread():
        return work()
    return ThreadPoolExecutor(1).submit(work).result()  # the thread ends with its work: nobody holds the pool
