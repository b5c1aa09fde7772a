"""Memory that this process has freed, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_memory() -> None:
    """Give back freed memory that the C library keeps for later; one that is not glibc keeps what it keeps.

    Packing weights, compiling and reading a tokenizer free much between what stays, which holds the rest.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
