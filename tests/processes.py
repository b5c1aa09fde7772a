"""What has become of a process."""

from __future__ import annotations

import psutil


def has_ended(pid: int) -> bool:
    """Return whether there is no such process any more, or only what its parent has not asked for yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
