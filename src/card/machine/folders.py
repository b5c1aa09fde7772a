"""Folders of this machine for what a later start can use again."""

from __future__ import annotations

import os
from pathlib import Path


def weights_folder(cache_dir: str | None) -> Path | None:
    """Return the cache folder for converted weights; an empty ``cache_dir`` keeps nothing."""
    return None if cache_dir == "" else cache_folder(cache_dir)


def cache_folder(given: str | None) -> Path:
    """Return the folder for what may be kept between starts: as given, or by the system's custom."""
    if given is not None:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "card"
