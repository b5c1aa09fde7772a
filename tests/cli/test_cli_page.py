"""docs/cli.md is what --help says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_cli_page.py"


def test_cli_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_cli_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.cli_page(), "run python scripts/make_cli_page.py"
