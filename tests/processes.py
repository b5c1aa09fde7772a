"""What has become of a process."""

from __future__ import annotations

import re

import psutil


def unhurried(written: str) -> str:
    """Return what a command wrote without the lines that tell how long it has taken: a busy machine takes long."""
    return re.sub(r"^.* \(\d+ s\)\n", "", written, flags=re.MULTILINE)


def has_ended(pid: int) -> bool:
    """Return whether there is no such process any more, or only what its parent has not asked for yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
