"""Folders of random drafters, which a module's `random_of` makes, and of the target of heads, by its `TARGET_OF`."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.own_head import save_target


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the target of all random heads."""
    module = request.module
    return save_target(module.random_of(module.TARGET_OF), tmp_path_factory.mktemp("heads") / "target")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the folder of a form or a kind once."""
    root = tmp_path_factory.mktemp("drafters")
    return functools.cache(lambda name: request.module.random_of(name).save(root / name))
