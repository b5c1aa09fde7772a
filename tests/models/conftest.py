"""What tests of models share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a folder with a tiny model of a kind, once for each; not to be changed."""
    from tests.gguf_files import demo_tokenizer, save_model  # where PyTorch is: tests of the core run without it

    root, made = tmp_path_factory.mktemp("folders"), {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = root / kind
            save_model(made[kind], kind, demo_tokenizer())
        return made[kind]

    return folder
