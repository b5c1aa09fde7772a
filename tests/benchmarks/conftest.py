"""The scripts import one another by name, from their own folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.benchmarks.scripts import BENCHMARKS, MODULES


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The benchmark scripts as modules, importing one another as they do when run."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(MODULES) - before:
            sys.modules.pop(name, None)
