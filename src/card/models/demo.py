"""The demo pair that ships with the package, and questions for it: a first run without a download."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from card.errors import ModelError

DemoRole = Literal["target", "draft"]

DEMO_NAMES: dict[str, DemoRole] = {"demo-target": "target", "demo-draft": "draft"}  # model names that users may give

_PROBLEMS = json.loads((Path(__file__).parent / "demo_pair" / "problems.json").read_text("utf-8"))
# To measure with: grade-school word problems of the kind in the demo pair's training. The pair gets them wrong.
SAMPLE_PROBLEMS: tuple[str, ...] = tuple(_PROBLEMS["samples"])
# Easier ones to show, with their answers: the demo target, often wrong, gets these right, in float32 and in bfloat16.
DEMO_ANSWERS: Mapping[str, int] = MappingProxyType(_PROBLEMS["answers"])
DEMO_PROBLEMS: tuple[str, ...] = tuple(DEMO_ANSWERS)


def demo_folder(name: DemoRole) -> Path:
    """Return the folder of the demo pair's target or draft.

    Raises: ModelError if this installation came without its weights.
    """
    folder = Path(str(resources.files("card"))) / "models" / "demo_pair" / name
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the demo {name} model is not part of this installation ({folder} holds no config.json); "
            "reinstall the package, or name another model"
        )
    return folder
