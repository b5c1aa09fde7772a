"""What a model's maker says of sampling, and the tokens that begin and end a text: generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_NAME = "generation_config.json"
_OF_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id")


class GenerationConfig(SimpleNamespace):
    """The fields that a file states, as attributes."""

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is stated, under transformers' name for it."""
        return dict(vars(self))


def read_generation_config(folder: Path, config: Any) -> GenerationConfig:
    """Return the generation config of a folder; where it has none, that of its config.

    Raises: OSError, ValueError if it cannot be read.
    """
    file = folder / _NAME
    stated: Any = json.loads(file.read_text("utf-8")) if file.is_file() else of_config(config.to_dict())
    if not isinstance(stated, dict):
        raise ValueError(f"{_NAME} holds no object")
    return GenerationConfig(**stated)


def of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a config states too."""
    return {name: config[name] for name in _OF_CONFIG if config.get(name) is not None}


def check_generation_config(folder: Path) -> None:
    """Raise OSError or ValueError if a folder has a generation config that cannot be read."""
    if (folder / _NAME).is_file():
        read_generation_config(folder, None)
