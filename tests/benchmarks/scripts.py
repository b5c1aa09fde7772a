"""The benchmark scripts as modules, and what they write."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = {path.stem: path for path in sorted(BENCHMARKS.rglob("*.py")) if ".build" not in path.parts}


class Modules(dict[str, ModuleType]):
    """The scripts as modules; each is imported when it is first asked for."""

    def __missing__(self, name: str) -> ModuleType:
        self[name] = importlib.import_module(SCRIPTS[name].stem)
        return self[name]


@contextlib.contextmanager
def importing() -> Iterator[Modules]:
    """Let the scripts import one another in the block, as they do when run from their folders."""
    before, paths = set(sys.modules), sys.path.copy()
    sys.path[:0] = sorted({str(path.parent) for path in SCRIPTS.values()})
    try:
        yield Modules()
    finally:
        sys.path[:] = paths
        for name in SCRIPTS.keys() & (set(sys.modules) - before):
            del sys.modules[name]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the result lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
