"""Torch, where something has loaded it."""

from __future__ import annotations

import sys
from typing import Any


def loaded_torch() -> Any | None:
    """Return torch if this process has loaded it, else None.

    The core runs without torch, so nothing here may load it. But where modules of torch run, its threads compete with
    ours for the same cores, so they are set from here as well.
    """
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_num_threads") else None  # another thread may be loading it
