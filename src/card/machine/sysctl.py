"""Numbers that macOS tells by name; other systems tell none."""

from __future__ import annotations

import ctypes


def system_number(name: str) -> int:
    """Return a number that macOS knows by its name; 0 if it does not, and on other systems."""
    try:
        ask = ctypes.CDLL(None).sysctlbyname
    except (AttributeError, OSError, TypeError):
        return 0
    value = ctypes.c_int64(0)  # shorter numbers fill its beginning, on processors of either kind
    size = ctypes.c_size_t(ctypes.sizeof(value))
    return value.value if ask(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) == 0 else 0
