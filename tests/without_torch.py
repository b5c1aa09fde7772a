"""Which modules of tests need torch, or what comes with it, by what they import themselves or through helpers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.sources import CORE_TESTS

ROOT = Path(__file__).parents[1]
_LARGE = {"torch", "transformers", "playwright"}


@cache
def needs_torch(file: Path) -> bool:
    """Return whether a module imports one of these as it is loaded; what the package itself imports is not asked."""
    names = [name for node in ast.parse(file.read_text("utf-8")).body for name in _imported(node)]
    return any(name.split(".")[0] in _LARGE or _is_helper_with_torch(name) for name in names)


def is_run_by_core(file: Path) -> bool:
    """Return whether `make test-core` runs all of a module; some cells of that of doors run with PyTorch too."""
    below = file.relative_to(ROOT / "tests").parts
    is_of_core = below[0] in (*CORE_TESTS, "crosses") or below == ("test_without_torch.py",)
    if below == ("crosses", "test_doors.py"):
        return False
    return is_of_core and below[-1].startswith("test_") and not needs_torch(file)


def _imported(node: ast.stmt) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module, names):
            return [module or "", *(f"{module}.{alias.name}" for alias in names)]
        case ast.Assign(value=ast.Call(ast.Attribute(attr="importorskip"), [ast.Constant(str(name)), *_])):
            return [name]
    return []


def _is_helper_with_torch(name: str) -> bool:
    helper = ROOT / f"{name.replace('.', '/')}.py"
    return name.startswith("tests.") and helper.is_file() and needs_torch(helper)
