"""Where a model's name leads on this machine. Quick to import: a wrong path is told before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from card.errors import ModelError
from card.models.demo import DEMO_NAMES, demo_folder

_ADVICE = "give a folder saved by transformers"


def local_folder(name: str) -> Path | None:
    """Return the folder that a model's name means, or None for a name on the hub.

    Raises: ModelError if the name is a path that is no model folder.
    """
    if name in DEMO_NAMES:
        return demo_folder(DEMO_NAMES[name])
    path = Path(name).expanduser()
    looks_like_path = re.match(r"[./~\\]|[A-Za-z]:[\\/]", name) or name.endswith("/") or name.count("/") > 1
    if not name or not (looks_like_path or path.exists()):
        return None
    if not path.exists():
        raise ModelError(f"there is no folder {name}; give a model folder, or a name on the hub")
    if path.is_file():
        kind = "is a GGUF file; its weights are in llama.cpp's format" if _is_gguf(path) else "is a file"
        raise ModelError(f"{name} {kind}, so it is no model folder; {_ADVICE}")
    if not (path / "config.json").is_file():
        kind = "holds GGUF files and no config.json" if any(path.glob("*.gguf")) else "holds no config.json"
        raise ModelError(f"{name} {kind}, so it is no model folder; {_ADVICE}")
    return path


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return path.suffix == ".gguf"
