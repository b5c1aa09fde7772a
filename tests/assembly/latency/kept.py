"""What the file of latencies holds."""

from __future__ import annotations

import json
from pathlib import Path


def kept_names(folder: Path) -> list[str]:
    """Return what is kept in a folder, by its kind."""
    file = folder / "latencies.json"
    entries = json.loads(file.read_bytes())["entries"].values() if file.exists() else ()
    return sorted(entry["about"]["what"] for entry in entries)
