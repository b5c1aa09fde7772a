"""Machine code for commands that begin with an empty cache: to compile all of it takes five seconds."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from card.machine.folders import cache_folder

LEFT_OUT = "likeliest"  # of what is lent: a short function, which a start compiles and keeps then


def lent(cache: Path) -> Path:
    """Copy what this run has compiled, all but one function, to a cache folder that was empty; return that folder."""
    for file in (cache_folder(None) / "code").glob("*/*.o"):
        if not file.name.startswith(LEFT_OUT):
            folder = cache / "code" / file.parent.name
            for place in (cache.parent, cache, folder.parent, folder):
                place.mkdir(0o700, exist_ok=True)  # whatever the umask: what others can write to is not used
            with contextlib.suppress(FileNotFoundError):  # an older one that another process has just deleted
                shutil.copy2(file, folder)
    return cache


def is_kept(cache: Path) -> bool:
    """Return whether a start has kept what it compiled."""
    return any((cache / "code").glob(f"*/{LEFT_OUT}*.o"))
