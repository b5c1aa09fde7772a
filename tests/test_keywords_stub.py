"""What editors complete are the settings that an engine takes: the stub follows from their declarations."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from card.config.fields import declared
from card.config.registry import own_kinds

ROOT = Path(__file__).parents[1]
STUB = ROOT / "src" / "card" / "config" / "keywords.pyi"


def test_the_stub_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_keywords", ROOT / "scripts" / "make_keywords.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.stub() == STUB.read_text("utf-8"), "run python scripts/make_keywords.py"


def test_the_stub_has_the_settings_of_folders_too() -> None:
    fields = {node.target.id for node in ast.walk(ast.parse(STUB.read_text("utf-8")))
              if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}  # fmt: skip
    assert own_kinds()
    assert fields >= {name for kind in own_kinds() for name in declared(kind)}
