"""Which modules of tests need torch, or what comes with it, by what they import themselves or through helpers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LARGE = {"torch", "transformers", "playwright"}


@cache
def needs_torch(file: Path) -> bool:
    """Return whether a module imports one of these as it is loaded; what the package itself imports is not asked."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        if any(name.split(".")[0] in _LARGE or _is_helper_with_torch(name) for name in names):
            return True
    return False


def _is_helper_with_torch(name: str) -> bool:
    helper = ROOT / f"{name.replace('.', '/')}.py"
    return name.startswith("tests.") and helper.is_file() and needs_torch(helper)
