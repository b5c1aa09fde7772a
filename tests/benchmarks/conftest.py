"""The scripts import one another by name, from their own folders."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.benchmarks.scripts import importing


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The benchmark scripts as modules, importing one another as they do when run."""
    with importing() as modules:
        yield modules
