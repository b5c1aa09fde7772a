"""The core names no satellite: its reader learns how text is written exactly, and of no method, tool or experiment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.sources import SATELLITES, SOURCES, imports, package_of

_NAMED = re.compile(rf"card\.({'|'.join(sorted(SATELLITES))})\b")

# Modules of the core that name a satellite today. The list may only shrink.
ALLOWED: frozenset[tuple[str, str]] = frozenset(
    {
        ("card.api.start", "card.family.judges.choosing"),
        ("card.api.start", "card.family.specbranch.network"),
        ("card.assembly.latencies", "card.theirs.transformers.row_check"),
        ("card.cli.commands.measure", "card.tools.bench.command.run"),
        ("card.cli.commands.measure", "card.tools.bench.names"),
        ("card.cli.commands.measure", "card.tools.bench.report.command.run"),
        ("card.cli.commands.measure", "card.tools.planner.command.plan"),
        ("card.cli.commands.measure", "card.tools.planner.command.profile"),
        ("card.cli.commands.measure", "card.tools.planner.requests"),
        ("card.cli.commands.measure", "card.tools.verify_server.command.run"),
        ("card.cli.commands.measure", "card.tools.verify_server.settings"),
        ("card.cli.commands.pairs", "card.family.ctc.command.run"),
        ("card.cli.commands.pairs", "card.family.ctc.names"),
        ("card.cli.commands.pairs", "card.family.hivis.command.run"),
        ("card.cli.commands.pairs", "card.family.judges.command.run"),
        ("card.cli.commands.pairs", "card.family.pard.command.run"),
        ("card.cli.commands.pairs", "card.family.specbranch.command.run"),
        ("card.cli.commands.pairs", "card.labs.cascade.command.run"),
        ("card.cli.commands.pairs", "card.labs.steps.train_command.run"),
        ("card.cli.commands.pairs", "card.tools.check_pair.command.run"),
        ("card.cli.commands.pairs", "card.tools.planner.command.record"),
        ("card.cli.commands.text", "card.labs.steps.command.run"),
        ("card.cli.main", "card.labs.series.options"),
        ("card.cli.options", "card.tools.bench.names"),
        ("card.drafting.draft_writers", "card.theirs.cuda.bucketed"),
        ("card.drafting.draft_writers", "card.theirs.cuda.device_beam"),
        ("card.drafting.local.ctc", "card.family.ctc.candidates"),
        ("card.drafting.local.ctc", "card.family.ctc.head"),
        ("card.drafting.local.hivis", "card.family.hivis.drafting"),
        ("card.drafting.local.hivis", "card.family.hivis.head"),
        ("card.models.loading", "card.theirs.transformers.opening"),
        ("card.models.loading", "card.theirs.vision.tower"),
        ("card.models.own.exact_decoder", "card.theirs.transformers.generic"),
        ("card.models.runners", "card.theirs.cuda.bucketed"),
        ("card.models.runners", "card.theirs.transformers.hybrid"),
        ("card.models.torch_runner", "card.theirs.cuda.fused"),
        ("card.models.torch_runner", "card.theirs.transformers.generic"),
    }
)


def _named(source: str, package: str) -> Iterator[str]:
    """Yield the modules of satellites that a module imports, or names in a string that is not a docstring."""
    for found in imports(source, package):
        if _NAMED.match(found.module):
            yield found.module
    tree = ast.parse(source)
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


@pytest.mark.parametrize(
    "line",
    [
        "from card.tools.bench.names import ROWS",
        "import card.tools.bench",
        "from card import tools",
        "def run():\n    from card.tools.bench.names import ROWS",
        "import_module('card.tools.bench.names')",
    ],
)
def test_a_module_of_the_core_that_names_a_satellite_is_found(line: str) -> None:
    assert len(list(_named(line, "card.engine"))) == 1
    assert _is_core("card.engine.loop") and not _is_core("card.tools.bench.names")


def test_what_only_a_docstring_says_is_no_name() -> None:
    assert list(_named('"""card.tools.bench measures."""', "card.engine")) == []
