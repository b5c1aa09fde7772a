"""The demo pair that ships with the package, and questions for it: a first run without a download."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from card.errors import ModelError

DemoRole = Literal["target", "draft"]

DEMO_NAMES: dict[str, DemoRole] = {"demo-target": "target", "demo-draft": "draft"}  # model names that users may give

# Word problems with their answers: the demo target, often wrong, gets these right, in float32 and in bfloat16.
DEMO_ANSWERS: Mapping[str, int] = MappingProxyType(
    {
        "Anna has 25 apples. She eats 3 apples and gives 6 apples to a friend. How many apples does she have left?": 16,
        "Tom bakes 6 trays of cookies with 8 cookies on each tray. He sells them for $3 each. "
        "How much money does he make?": 144,
        "Paul works 4 hours a day and earns $12 per hour. How much does he earn in 3 days?": 144,
        "Omar fills 6 boxes of apples with 9 apples in each box. He gives 13 apples to his neighbors. "
        "How many apples does he have left?": 41,
        "Lucy has $50. She buys a bag for $18 and a book for $12. How much money does she have left?": 20,
        "David has 2 hens. Each hen eats 4 scoops of corn per day. "
        "How many scoops of corn does he need for 7 days?": 56,
        "Mira has $50. She buys a lamp for $14 and a vase for $4. How much money does she have left?": 32,
        "Tom buys 5 shirts for $16 each and 2 hats for $11 each. How much does he spend in total?": 102,
        "Ben has 23 apples. He eats 3 apples and gives 6 apples to a friend. How many apples does he have left?": 14,
        "Paul makes 5 plates of pancakes with 10 pancakes on each plate. "
        "He gives 10 pancakes to his neighbors. How many pancakes does he have left?": 40,
        "Dan has $40. He buys a game for $5 and a cap for $12. How much money does he have left?": 23,
        "Mira fills 7 boxes of apples with 5 apples in each box. She gives 18 apples to her neighbors. "
        "How many apples does she have left?": 17,
    }
)
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


def demo_hrad() -> Path:
    """Return the file of the demo pair's H-RAD predictor. Raises: ModelError if this installation came without it."""
    path = Path(str(resources.files("card"))) / "models" / "demo_pair" / "hrad.safetensors"
    if not path.is_file():
        raise ModelError(
            f"the demo pair's H-RAD predictor is not part of this installation (there is no {path}); reinstall the"
            " package, or train one with card train hrad"
        )
    return path
