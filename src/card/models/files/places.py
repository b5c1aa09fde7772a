"""Places of models on this machine, by name. Quick to import: a wrong path is told before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from card.errors import ModelError
from card.machine.folders import expanded
from card.models.demo import DEMO_NAMES, demo_folder
from card.models.files.known_pairs import known_file

GGUF_SUFFIX = ".gguf"
_ADVICE = "give a folder saved by transformers, or a GGUF file"
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+)")


def local_model(name: str) -> Path | None:
    """Return the folder or GGUF file that a model's name means, or None for a name on the hub.

    Raises: ModelError if the name is a path that is neither.
    """
    if name in DEMO_NAMES:
        return demo_folder(DEMO_NAMES[name])
    path = expanded(name)
    if not name or not (_looks_like_path(name) or path.exists()):
        return None
    if not path.exists():
        kind = "file" if name.endswith(GGUF_SUFFIX) else "folder"
        raise ModelError(f"there is no {kind} {name}; give a model {kind}, or a name on the hub")
    if path.is_file():
        if is_gguf(path):
            return path
        if path.suffix == GGUF_SUFFIX:
            raise ModelError(f"{name} is no GGUF file: it does not begin with GGUF; copy or download it again")
        raise ModelError(f"{name} is a file, so it is no model folder; {_ADVICE}")
    if not (path / "config.json").is_file():
        files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
        if files:
            raise ModelError(
                f"{name} holds GGUF files and no config.json; name the file, such as {name}/{files[0].name}"
            )
        raise ModelError(f"{name} holds no config.json, so it is no model folder; {_ADVICE}")
    return path


def hub_file(name: str) -> tuple[str, str] | None:
    """Return repository and file of a hub name such as org/repo/model.gguf; None for the name of a whole model.

    A repository of the known pairs stands for its file.
    """
    if not name.endswith(GGUF_SUFFIX):
        known = known_file(name)
        return None if known is None else (known.repository, known.file)
    match = _HUB_FILE.fullmatch(name)
    return None if match is None else (match[1], match[2])


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do; one that cannot be read is judged by its name."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return path.suffix == GGUF_SUFFIX


def _looks_like_path(name: str) -> bool:
    if re.match(r"[./~\\]|[A-Za-z]:[\\/]", name) or name.endswith("/"):
        return True
    if name.endswith(GGUF_SUFFIX):
        return hub_file(name) is None
    return name.count("/") > 1
