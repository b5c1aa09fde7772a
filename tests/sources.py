"""The sources of the package, for tests of rules that hold for every module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import card

PACKAGE = Path(card.__file__).parent

# Public names of packages of satellites: a file of a few lines each.
DOORS = frozenset({"cascade", "hf", "onnx", "ray", "series", "vllm"})

# Rooms that stand beside the core. Deleting a folder of one breaks nothing that lies outside it.
SATELLITES = DOORS | {"family", "inside", "labs", "backends", "tools"}

# Folders of tests that pass without the satellites; those of families, tools and labs need theirs.
CORE_TESTS = (
    *("api", "assembly", "cli", "config", "drafting", "engine", "kernels", "links", "machine", "models"),
    *("server", "text", "tree"),
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, by its absolute name, and where."""

    module: str
    line: int
    in_function: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules_named(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
    if module == "card":  # `from card import errors` names a part, or one of the public names
        return [f"card.{alias.name}" for alias in node.names]
    return [module]


@cache
def imports(source: str, package: str) -> tuple[Import, ...]:
    """Return every import of ``source``, type-checking ones included; ``package`` resolves relative ones.

    After a bare ``import card`` each use of ``card.name`` counts as an import of it.
    """
    return tuple(imports_of(ast.parse(source), package))


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Yield the same of a module that is parsed already."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, in_function = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules_named(node, package):
                yield Import(module, node.lineno, in_function)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "card":
            yield Import(f"card.{node.attr}", node.lineno, in_function=False)
        below = in_function or isinstance(node, FunctionNode)
        waiting.extend((child, below) for child in ast.iter_child_nodes(node))


def at_run_time(source: str) -> ast.Module:
    """Return a parsed module without what it imports for types alone."""
    tree = ast.parse(source)
    tree.body = [one for one in tree.body if not (isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING")]
    return tree


MODULES: dict[str, Path] = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES: dict[str, str] = {name: path.read_text("utf-8") for name, path in MODULES.items()}


def package_of(name: str) -> str:
    """Return the package that relative imports of the module ``name`` start from."""
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


def faults_everywhere(rule: Callable[[str, str], list[str]]) -> str:
    """Return what the rule, of a source and its module's name, finds in the whole package; a line a fault."""
    return "\n".join(fault for name, source in SOURCES.items() for fault in rule(source, name))
