"""The core names no satellite: its reader learns how text is written exactly, and of no method, tool or experiment."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import CORE_TESTS, SATELLITES, SOURCES, at_run_time, imports, imports_of, package_of

TESTS = Path(__file__).parent

_NAMED = re.compile(rf"card\.({'|'.join(sorted(SATELLITES))})\b")
# Sources that may name one: the others, most of them, need no look at their trees, which costs a hundred times as much.
_MAY_NAME = re.compile(rf"(card\.|from\s+[.\w]*|import\s[^(\n]*|import\s*\([^)]*)\b({'|'.join(sorted(SATELLITES))})\b")

# Modules of the core that name a satellite today. The list may only shrink.
ALLOWED = {
    ("card.models.by_transformers", "card.backends.")
}  # the seam itself: what runs the models that our own pass does not


def _named(source: str, package: str, parse: Callable[[str], ast.Module] = ast.parse) -> Iterator[str]:
    """Yield the modules of satellites that a module imports, or names in a string that is not a docstring."""
    if not _MAY_NAME.search(source):
        return
    tree = parse(source)
    for found in imports_of(tree, package):
        if _NAMED.match(found.module):
            yield found.module
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
        if is_text and _NAMED.match(node.value):
            yield node.value


def _is_core(name: str) -> bool:
    return name.split(".")[1:2] != [] and not _NAMED.match(name)


def test_the_core_names_no_satellite_but_where_the_list_says_so() -> None:
    found = {
        (name, module)
        for name, source in SOURCES.items()
        if _is_core(name)
        for module in _named(source, package_of(name))
    }
    assert found == ALLOWED, "the core names no satellite: use a seam; and what is gone leaves the list"


def test_the_core_imports_neither_torch_nor_transformers_but_for_types() -> None:
    for name, source in SOURCES.items():
        if _is_core(name) and re.search(r"import.*\b(torch|transformers)\b|from\s+(torch|transformers)\b", source):
            assert not re.search(r"^(import|from) (torch|transformers)\b", source, re.M), name
            within = [one.module for one in imports(source, package_of(name)) if one.in_function]
            assert not [module for module in within if module.split(".")[0] in ("torch", "transformers")], name


@pytest.mark.parametrize(
    "line",
    [
        "from card.tools.bench.row_names import ROWS",
        "import card.tools.bench",
        "from card import tools",
        "from card import (\n    text,\n    tools,\n)",
        "from ..tools.bench import row_names",
        "def run():\n    from card.tools.bench.row_names import ROWS",
        "import_module('card.tools.bench.row_names')",
    ],
)
def test_a_module_of_the_core_that_names_a_satellite_is_found(line: str) -> None:
    assert len(list(_named(line, "card.engine"))) >= 1
    assert _is_core("card.engine.loop") and not _is_core("card.tools.bench.row_names")


def test_what_only_a_docstring_says_is_no_name() -> None:
    assert list(_named('"""card.tools.bench measures."""', "card.engine")) == []


# What tests of the core may name beside it: its own methods, and other models' modules, which they compare with.
NAMED_IN_TESTS = ("card.family.classic", "card.backends")


def _named_by_tests(files: Iterable[Path]) -> set[tuple[str, str]]:
    """Return (file, module of a satellite) for all that tests, and helpers that they import, name as they run."""
    found, waiting, known = set(), list(files), set[Path]()
    while waiting:
        file = waiting.pop()
        if file in known or not file.is_file():
            continue
        known.add(file)
        source = file.read_text("utf-8")
        named = _named(source, "", at_run_time)
        found.update((file.name, one) for one in named if not one.startswith(NAMED_IN_TESTS))
        own = (one.module for one in imports_of(at_run_time(source), "") if one.module.startswith("tests."))
        waiting += (TESTS.parent / f"{module.replace('.', '/')}.py" for module in own)
    return found


def test_the_tests_of_the_core_name_no_satellite() -> None:
    assert _named_by_tests(file for folder in CORE_TESTS for file in (TESTS / folder).rglob("*.py")) == set()


def test_a_test_of_the_core_that_names_a_satellite_is_found(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    for line in ("from tests.trainings import trained", "def test():\n    import card.tools.bench"):
        file.write_text(line)
        assert _named_by_tests([file])
    file.write_text("from card.family.classic.sps import METHOD\nfrom tests.reaching_in import say_why_not_int8")
    assert not _named_by_tests([file])


# Folders that others of their kind share.
SHARED = frozenset({"family/classic", "family/learning", "inside/adapters", "backends/transformers"})
# What else a folder beside the core needs of another one. The list may only shrink.
NEEDED: dict[str, set[str]] = {
    "tools/bench": {"family/judges"},
    "tools/planner": {"family/ctc", "tools/bench"},
    "tools/verify_server": {"tools/bench"},
}


def test_a_folder_beside_the_core_needs_no_other_one_but_where_the_list_says_so() -> None:
    found: dict[str, set[str]] = {}
    for name, source in SOURCES.items():
        if not (folder := _folder_of(name)):
            continue
        for other in filter(None, (_folder_of(one.module) for one in imports(source, package_of(name)))):
            if other not in {folder, *SHARED}:
                found.setdefault(folder, set()).add(other)
    there = {_folder_of(name) for name in SOURCES}
    assert found == {folder: others for folder, others in NEEDED.items() if folder in there}


def _folder_of(module: str) -> str:
    parts = module.split(".")
    return "/".join(parts[1:3]) if len(parts) > 2 and _NAMED.match(module) else ""


def test_verify_server_knows_nothing_of_our_engine_but_how_to_be_a_command() -> None:
    judging = [name for name in SOURCES if name.startswith("card.tools.verify_server.")]
    parts = {one.module for name in judging if not name.endswith((".command", ".options", ".record"))
             for one in imports(SOURCES[name], package_of(name)) if one.module.startswith("card.")}  # fmt: skip
    allowed = ("card.config", "card.errors", "card.machine", "card.tools.verify_server", "card.__version__")
    assert [module for module in sorted(parts) if not module.startswith(allowed)] == []
