"""The tree shows the architecture: who may import whom, how long things may be, what `import card` loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, get_args, get_type_hints

import pytest

import card
from tests.sources import (
    DOORS,
    PACKAGE,
    SATELLITES,
    SOURCES,
    FunctionNode,
    faults_everywhere,
    imports,
    package_of,
)

# What stands beside the packages: the public names, `python -m card`, and the errors that everything may raise.
FLAT_MODULES = frozenset({"__init__", "__main__", "errors"}) | DOORS

# Lowest first; a part is a module or a package of src/card. Each imports only from itself and from lines above its own;
# tests/test_core.py says what the satellites may import.
# "Where things are" in docs/how-it-works.md is the same list, with a word on each part.
LINES: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("config",),
    ("machine",),
    ("kernels",),
    ("tree",),
    ("text",),
    ("models",),
    ("drafting",),
    ("links",),
    ("engine",),
    ("assembly",),
    ("api",),
    ("server",),
    ("cli",),
    ("__main__",),
)
LINE_OF = {part: line_idx for line_idx, parts in enumerate(LINES) for part in parts}

# Imported where they are used, because `pip install card-decoding` does not bring them.
OPTIONAL_PACKAGES = frozenset(
    {
        "accelerate",
        "bitsandbytes",
        "datasets",
        "fastapi",
        "gguf",  # as slow, and asked for by types of weights that are no blocks of ours
        "huggingface_hub",  # which is slow to import, and asked for by names on the hub alone
        "llguidance",
        "PIL",
        "matplotlib",
        "onnxruntime_genai",
        "prometheus_client",
        "ray",
        "scipy",
        "triton",
    }
    | {"uvicorn", "vllm", "yaml"}
)

# Most lines of each room: its size of the day when it was last set, and a little room to work in. Lower one that has
# shrunk; raise one only with a line in docs/decisions.md that says what the new lines earn.
MAX_ROOM_LINES = {
    "api": 2200,
    "assembly": 2300,
    "cli": 3060,
    "config": 1600,
    "drafting": 2400,
    "engine": 5400,
    "family": 7900,
    "inside": 2250,
    "kernels": 7500,
    "labs": 2750,
    "links": 2600,
    "machine": 1640,
    "models": 16650,
    "server": 8550,
    "text": 6960,
    "backends": 4100,
    "tools": 10620,
    "tree": 1200,
}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 65

# What `import card` must leave alone: each costs the start-up of `card --help` from tens of ms to seconds.
HEAVY_PACKAGES = ("torch", "transformers", "numpy", "msgspec", "zmq", "typer", "rich", "jinja2")


def _layer_faults(source: str, name: str, package: str) -> list[str]:
    """Return what is wrong with the imports of the module ``name`` (``card.part...``), one line of text each."""
    part = name.split(".")[1]
    if part not in LINE_OF and part not in SATELLITES:
        return [f"{name}: {part!r} has no line; give it one in LINES and in the layout of the documentation"]
    faults, is_for_a_device = [], "cuda" in name.split(".")
    for found in imports(source, package):
        root, _, below = found.module.partition(".")
        imported = below.partition(".")[0]
        if root == "card" and imported and not imported.startswith("__"):  # card.__version__ is everyone's
            if imported not in LINE_OF and imported not in SATELLITES:
                faults.append(f"{name}:{found.line}: imports {found.module}, which is no part; name the module itself")
            elif imported != part and LINE_OF.get(imported, -1) >= LINE_OF.get(part, len(LINES)):
                faults.append(f"{name}:{found.line}: {part} imports {imported}, which does not lie above it")
        if root == "card" and "cuda" in below.split(".") and not is_for_a_device:
            if not found.in_function:
                faults.append(f"{name}:{found.line}: imports {found.module}; do it where a device is known to be named")
        elif found.in_function and root not in OPTIONAL_PACKAGES:
            faults.append(f"{name}:{found.line}: imports {found.module} inside a function; move it to the top")
    return faults


def _length_faults(source: str, name: str) -> list[str]:
    """Return the modules and functions of ``source`` that are too long, one line of text each."""
    num_lines = len(source.splitlines())
    is_long = num_lines > MAX_MODULE_LINES
    faults = [f"{name}: {num_lines} lines, at most {MAX_MODULE_LINES}; split it"] if is_long else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FunctionNode) and node.end_lineno is not None:
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                faults.append(f"{name}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}")
    return faults


def _in_fresh_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_module_imports_only_from_its_own_part_and_from_lines_above() -> None:
    parts = {name: source for name, source in SOURCES.items() if name != "card"}
    faults = [fault for name, source in parts.items() for fault in _layer_faults(source, name, package_of(name))]
    assert not faults, "\n".join(faults)


def _check_circles(sources: Mapping[str, str]) -> None:
    """Raise CycleError, with the modules, if one imports another that imports it, for types too."""
    graph = {
        name: {found.module for found in imports(source, name.rpartition(".")[0])} & sources.keys()
        for name, source in sources.items()
    }
    TopologicalSorter({name: found - {name} for name, found in graph.items()}).prepare()


def test_no_module_imports_one_that_imports_it() -> None:
    _check_circles(SOURCES)


@pytest.mark.parametrize("line", ["", "if TYPE_CHECKING:\n    "])
def test_a_circle_of_modules_is_found(line: str) -> None:
    ring = {f"card.engine.{one}": f"{line}from card.engine.{other} import A" for one, other in ("ab", "bc", "ca")}
    with pytest.raises(CycleError):
        _check_circles(ring)
    _check_circles(ring | {"card.engine.c": ""})


def _check_rooms(sources: Mapping[str, str]) -> None:
    """Raise CycleError, with the rooms, if one imports another that imports it, for types too."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        named = (found.module.split(".") for found in imports(source, name.rpartition(".")[0]))
        graph.setdefault(name.split(".")[1], set()).update(
            parts[1] for parts in named if parts[0] == "card" and parts[1:]
        )
    TopologicalSorter({room: found - {room} for room, found in graph.items()}).prepare()


def test_no_room_imports_one_that_imports_it() -> None:
    _check_rooms({name: source for name, source in SOURCES.items() if name != "card"})


@pytest.mark.parametrize("line", ["from card.labs.b import A", "if TYPE_CHECKING:\n    from card.labs.b import A"])
def test_a_circle_of_rooms_is_found_where_no_module_is_in_one(line: str) -> None:
    sources = {"card.tools.a": line, "card.labs.b": "", "card.labs.c": "from card.tools.d import B", "card.tools.d": ""}
    _check_circles(sources)
    with pytest.raises(CycleError, match="tools"):
        _check_rooms(sources)
    _check_rooms(sources | {"card.labs.c": "from card.labs.b import A"})


def test_the_package_itself_imports_at_the_top() -> None:
    assert not any(found.in_function for found in imports(SOURCES["card"], "card"))


def test_every_other_module_lies_in_a_package() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == FLAT_MODULES


def test_every_part_with_a_line_exists() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(LINE_OF) == sorted((packages | FLAT_MODULES) - SATELLITES - {"__init__"})


MOST_ROOMS = 18


def test_there_are_few_enough_rooms_to_remember() -> None:
    assert len({path.parent.name for path in PACKAGE.glob("*/__init__.py")}) <= MOST_ROOMS


def _lines_of_the_map(page: str) -> tuple[tuple[str, ...], ...]:
    """Return the parts in "Where things are", line by line; a number begins each line, with its first part."""
    rows = re.findall(
        r"^( *\d+|  )  (\w+) {2,}\S", page.partition("\n## Where things are\n```text\n")[2].partition("```")[0], re.M
    )
    lines: list[list[str]] = []
    for number, part in rows:
        if number.strip():
            assert int(number) == len(lines) + 1, f"{part} begins line {number}"
            lines.append([])
        lines[-1].append(part)
    return tuple(map(tuple, lines))


def test_the_map_of_the_documentation_shows_every_part_in_its_line() -> None:
    page = PACKAGE.parents[1] / "docs" / "how-it-works.md"
    assert _lines_of_the_map(page.read_text("utf-8")) == LINES


def test_modules_and_functions_are_short_enough_to_read() -> None:
    assert not faults_everywhere(_length_faults)


def _room_faults(sources: Mapping[str, str]) -> list[str]:
    """Return the rooms that have more lines than their budget, or none, one line of text each."""
    sizes: dict[str, int] = {}
    for name, source in sources.items():
        room = name.split(".")[1]
        sizes[room] = sizes.get(room, 0) + len(source.splitlines())
    return [
        f"{room}: {size} lines, at most {MAX_ROOM_LINES.get(room, 0)}; cut as many as came, or raise MAX_ROOM_LINES in "
        "tests/test_layout.py with a line in docs/decisions.md that says what they earn"
        for room, size in sizes.items()
        if room not in FLAT_MODULES and size > MAX_ROOM_LINES.get(room, 0)
    ]


def test_a_room_keeps_its_budget_of_lines() -> None:
    faults = _room_faults({name: source for name, source in SOURCES.items() if name != "card"})
    assert not faults, "\n".join(faults)
    there = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert MAX_ROOM_LINES.keys() == there, "a room that is gone leaves the list"


def test_a_room_over_its_budget_or_without_one_is_found() -> None:
    most = MAX_ROOM_LINES["tree"]
    halves = {"card.tree.a": "x = 1\n" * (most // 2), "card.tree.b": "x = 1\n" * (most - most // 2)}
    assert _room_faults(halves) == []
    (fault,) = _room_faults(halves | {"card.tree.c": "x = 1"})
    assert fault.startswith(f"tree: {most + 1} lines, at most {most}; ") and "docs/decisions.md" in fault
    (fault,) = _room_faults({"card.surprise.a": "x = 1"})
    assert fault.startswith("surprise: 1 lines, at most 0")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("card.tree.sampling", "from card.engine.target import TargetWorker"),
        ("card.tree.sampling", "import card.api.llm"),
        ("card.engine.loop", "from card import api"),
        ("card.engine.loop", "from ..api.llm import LLM"),
        ("card.engine.loop", "from card import LLM"),
        ("card.engine.loop", "import card\nllm = card.LLM()"),
        ("card.engine.loop", "import card.errors\nllm = card.api"),
        ("card.engine.loop", "if TYPE_CHECKING:\n    from card.api.llm import LLM"),
        ("card.engine.loop", "def run():\n    import torch"),
        ("card.engine.loop", "class A:\n    async def run(self):\n        from card.config import DraftSettings"),
        ("card.surprise", "import ast"),
        ("card.errors", "from card.config import DraftSettings"),
        ("card.tree.sampling", "from card.engine.engine import Engine"),
        ("card.drafting.beam", "from card.backends.cuda.bucketed import BucketedRunner"),
    ],
)
def test_the_layer_rule_finds_what_it_forbids(name: str, source: str) -> None:
    assert len(_layer_faults(source, name, name.rpartition(".")[0])) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("card.config", "from card.errors import SettingsError"),
        ("card.drafting.beam", "def make():\n    from card.backends.cuda.bucketed import BucketedRunner"),
        ("card.backends.cuda.beam", "from card.backends.cuda.bucketed import BucketedRunner"),
        ("card.engine.loop", "from . import policy\nfrom .policy import Policy\nfrom ..errors import CardError"),
        ("card.engine.loop", "import card\nversion = card.__version__"),
        ("card.cli.app", "from card import __version__\nfrom card.tools.bench import run\nimport typer"),
        ("card.engine.loop", "def run():\n    import accelerate"),
    ],
)
def test_the_layer_rule_lets_pass_what_it_allows(name: str, source: str) -> None:
    assert _layer_faults(source, name, name.rpartition(".")[0]) == []


def test_the_length_rule_finds_long_modules_and_long_functions() -> None:
    function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert len(_length_faults(function, "card.engine.loop")) == 1
    module = "\n" * (MAX_MODULE_LINES + 1)
    assert len(_length_faults(module, "card.engine.loop")) == 1


def test_importing_the_package_loads_no_heavy_package() -> None:
    code = f"import sys, card; print(*(name for name in {HEAVY_PACKAGES!r} if name in sys.modules))"
    assert _in_fresh_python(code) == ""


def test_settings_and_errors_are_reached_without_heavy_packages() -> None:
    code = (
        "import sys; from card import CardError, DraftSettings, SamplingParams; "
        f"print(*(name for name in {HEAVY_PACKAGES!r} if name in sys.modules))"
    )
    assert _in_fresh_python(code) == ""


def test_decoding_with_the_demo_pair_on_the_cpu_loads_no_modelling_code_and_nothing_for_cuda() -> None:
    code = (
        "import sys; from card import LLM\n"
        "settings = {'placement': 'inline', 'cache': False, 'threads': 1}\n"
        "with LLM('demo-target', 'demo-draft', **settings) as llm: llm.generate('2 + 2')\n"
        "heavy = 'torch._dynamo', 'torch.distributed.tensor', 'sympy', 'transformers.modeling_utils'\n"
        "print(*(name for name in heavy if name in sys.modules))\n"
        "quick = '.record', '.choosing'\n"
        "cuda = (name for name in sys.modules if name.startswith('card.backends.cuda.') and not name.endswith(quick))\n"
        "print(*cuda)"
    )
    assert _in_fresh_python(code) == ""


def test_a_comparison_of_own_methods_needs_no_torch() -> None:
    code = (
        "import sys; from card.tools.bench.command import run; from card.tools.bench.environment import describe_run\n"
        "assert describe_run().versions['torch']\n"
        "print(*(name for name in ('torch', 'transformers') if name in sys.modules))"
    )
    assert _in_fresh_python(code) == ""


@pytest.mark.parametrize("name", sorted(card.MODULE_OF))
def test_a_public_name_is_the_one_of_its_module(name: str) -> None:
    module = card.MODULE_OF[name]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    value = getattr(card, name)
    assert value.__module__ == module
    assert name in dir(card)


def test_the_public_names_are_those_that_the_package_can_import() -> None:
    assert set(card.__all__) == {*card.MODULE_OF, "__version__", "hf"}
    assert dir(card) == sorted(card.__all__), "and nothing else is shown"


def _classes(annotation: Any) -> set[type]:
    inner = {one for part in get_args(annotation) for one in _classes(part)}
    return inner | (
        {annotation} if isinstance(annotation, type) and annotation.__module__.startswith("card") else set()
    )


@pytest.mark.parametrize("name", ["RequestOutput", "CompletionOutput", "StreamChunk"])
def test_what_an_answer_holds_has_public_types(name: str) -> None:
    held = {one for annotation in get_type_hints(getattr(card, name)).values() for one in _classes(annotation)}
    assert {one.__name__ for one in held} <= set(card.__all__)


def test_an_unknown_name_raises_an_error_that_lists_the_public_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Sampler'.*SamplingParams"):
        card.Sampler  # noqa: B018


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# ---- new files are written in short lines ----------------------------------------------------------------------------

MAX_MEAN_WIDTH = 45  # characters of a line of code, without its indentation
MEASURED_FROM = "21b4b91d"  # files of this commit may be denser, as nearly a half of them are
MIN_LINES = 10  # of code: the mean of fewer says little


def _mean_width(source: str) -> float:
    """Return the mean of the lines of code, without indentation, comments, docstrings and blank lines."""
    tree = ast.parse(source)
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    skipped = {number for node in texts for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = [line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in skipped]
    code = [line for line in lines if line and not line.startswith("#")]
    return sum(map(len, code)) / len(code) if len(code) >= MIN_LINES else 0.0


def test_files_that_are_new_have_short_lines() -> None:
    command = ["git", "diff", "--name-only", "--diff-filter=A", "--find-renames", MEASURED_FROM, "--", "*.py"]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False) if which("git") else None
    if done is None or done.returncode:
        pytest.skip("there is no git with the whole history here")
    new = [PACKAGE.parents[1] / name for name in done.stdout.split() if name.startswith("src/")]
    widths = {path.name: _mean_width(path.read_text("utf-8")) for path in new}
    assert {name: width for name, width in widths.items() if width > MAX_MEAN_WIDTH} == {}, "break dense lines up"


def test_the_width_of_code_leaves_out_what_is_no_code() -> None:
    code = "x = 1\n" * MIN_LINES
    assert _mean_width(f'"""{"Long. " * 20}"""\n# {"long " * 20}\n\nif a:\n    b = 2\n{code}') == 5.0
    assert _mean_width(code[6:]) == 0.0
    assert _mean_width(f"y = {'1' * 46}\n" * MIN_LINES) > MAX_MEAN_WIDTH


# ---- one place makes engines ----------------------------------------------------------------------------------------

MADE_IN_ASSEMBLY = frozenset({"Engine", "TargetWorker", "DrafterWorker", "make_policy"})


def _assembly_faults(source: str, name: str) -> list[str]:
    """Return where a module outside `card.assembly` makes a part of an engine, one line of text each."""
    if name.split(".")[1:2] == ["assembly"]:
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        made = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if made in MADE_IN_ASSEMBLY:
            faults.append(
                f"{name}:{called.lineno}: makes its own {made}; ask card.assembly (resolve, build, make_worker), where "
                "sizes, placements and policies are decided once: copies of these rules have drifted apart before"
            )
    return faults


def test_only_the_assembly_makes_engines() -> None:
    assert not faults_everywhere(_assembly_faults)


# ---- what commands are made of --------------------------------------------------------------------------------------

PARTS = "card.cli.parts"


def _command_faults(source: str, name: str) -> list[str]:
    """Return where a part of commands, or a folder beside the core, imports from the core's own commands."""
    if "".join(name.split(".")[1:2]) not in SATELLITES and not name.startswith(PARTS):
        return []
    modules = [one.module for one in imports(source, package_of(name))]
    return [
        f"{name}: imports {module}; what several commands need lies in {PARTS}"
        for module in modules
        if module.startswith("card.cli") and not module.startswith(PARTS)
    ]


def test_what_commands_share_lies_below_them() -> None:
    assert not faults_everywhere(_command_faults)
    assert _command_faults("from card.cli.demo import run", "card.tools.bench.command")
    assert _command_faults("from card.cli.main import cli", "card.cli.parts.groups")


# ---- one contract for drafters --------------------------------------------------------------------------------------

CONTRACT_OF_DRAFTERS = frozenset(
    {"draft_shaping", "drafted", "drafter", "drafter_pass", "draft_writers", "local", "messages", "protocol", "window"}
)  # of card.drafting


def _drafter_faults(source: str, name: str) -> list[str]:
    """Return where a module outside `card.drafting` and the methods knows how a drafter drafts, a line each."""
    if name.startswith(("card.drafting", "card.family", "card.backends.cuda")):
        return []
    faults = []
    for found in imports(source, name.rpartition(".")[0]):
        inner = found.module.removeprefix("card.drafting.").split(".")[0]
        if found.module.startswith("card.drafting") and inner not in CONTRACT_OF_DRAFTERS:
            faults.append(
                f"{name}:{found.line}: imports {found.module}; ask make_writer in card.drafting.draft_writers for a "
                "drafter, and use what DraftWriter in card.drafting.protocol declares"
            )
    return faults


def test_only_the_writers_know_how_a_drafter_drafts() -> None:
    assert not faults_everywhere(_drafter_faults)


@pytest.mark.parametrize(
    "line",
    [
        "from card.drafting.beam import BeamWriter",
        "from card.drafting import beam",
        "if TYPE_CHECKING:\n    from card.drafting.growth import RULES",
    ],
)
def test_a_module_that_knows_how_a_drafter_drafts_is_found(line: str) -> None:
    (fault,) = _drafter_faults(line, "card.tools.planner.another")
    assert "make_writer" in fault
    assert _drafter_faults(line, "card.drafting.another") == []
    assert _drafter_faults("from card.drafting.protocol import DraftWriter", "card.tools.planner.another") == []


@pytest.mark.parametrize("made", sorted(MADE_IN_ASSEMBLY))
def test_a_second_place_that_makes_an_engine_is_found(made: str) -> None:
    for call in (f"part = {made}(1)", f"import there\ndef f():\n    return there.{made}(1)"):
        (fault,) = _assembly_faults(call, "card.tools.planner.another")
        assert "card.assembly" in fault and made in fault
        assert _assembly_faults(call, "card.assembly.another") == []
    assert _assembly_faults(f"def f(one: {made}) -> None: ...", "card.tools.planner.another") == []


# ---- tests go in by the front door ----------------------------------------------------------------------------------

MAX_PRYING_FILES = 20
TESTS = sorted(Path(__file__).parent.rglob("*.py"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _private_names(source: str) -> set[str]:
    """Return the private names that a module defines: its own, those of its classes, and the attributes it sets."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FunctionNode | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return set(filter(_is_private, found))


def _pried(source: str, private: set[str]) -> set[str]:
    """Return those of the names ``private`` that a test reads, sets or imports; what is of its own ``self`` is its."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names if (node.module or "").startswith("card"))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "getattr"):
            words = (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))
            found.update(word.rpartition(".")[2] for word in words)
    return found & private


def test_few_files_of_tests_touch_what_is_private_to_the_package() -> None:
    private = set().union(*map(_private_names, SOURCES.values()))
    pried = {path: _pried(path.read_text("utf-8"), private) for path in TESTS}
    prying = [f"{path.name}: {', '.join(sorted(names))}" for path, names in pried.items() if names]
    assert len(prying) <= MAX_PRYING_FILES, "test by behaviour, or look through tests/reaching_in.py:\n" + "\n".join(
        prying
    )


@pytest.mark.parametrize(
    "line",
    [
        "worker._open.clear()",
        "self.worker._open = {}",
        "from card.drafting.drafter import _open",
        "monkeypatch.setattr(drafter, '_open', None)",
        "monkeypatch.setattr('card.drafting.drafter._open', None)",
    ],
)
def test_a_test_that_touches_what_is_private_is_found(line: str) -> None:
    private = _private_names("class A:\n    def __init__(self):\n        self._open = {}\n        self.wide = 1\n_ = 2")
    assert private == {"_open"}
    assert _pried(line, private) == {"_open"}
    assert _pried("self._open = worker.wide, worker._own", private) == set()
