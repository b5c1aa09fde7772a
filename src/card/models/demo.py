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

# Grade-school word problems of the kind that the demo pair was trained on, to measure with: it gets them wrong.
SAMPLE_PROBLEMS: tuple[str, ...] = (
    "Mira bakes 6 trays of rolls with 8 rolls on each tray. She gives 15 rolls to her neighbors and sells the rest for "
    "$2 each. How many dollars does she get?",
    "A bus leaves the station with 24 passengers. At the first stop 9 people get off and 13 get on. At the second stop "
    "half of the passengers get off. How many passengers are left on the bus?",
    "Tom reads 12 pages of his book every weekday and 20 pages on each day of the weekend. The book has 320 pages. How "
    "many weeks does he need to finish it?",
    "A farmer has 7 rows of apple trees with 9 trees in each row. Each tree gives 40 apples. He packs the apples into "
    "boxes of 60. How many boxes does he fill?",
    "Lena saves $15 a week for a bicycle that costs $180. Her grandmother gives her $45 as a start. After how many "
    "weeks can she buy the bicycle?",
    "A garden hose fills 18 liters of water in one minute. A pool holds 900 liters and is already one third full. How "
    "many minutes does it take to fill the rest?",
    "Omar buys 3 notebooks for $4 each and 5 pens for $2 each. He pays with a $50 bill. How much change does he get?",
    "A class of 28 students goes to the museum. A ticket costs $6 for a student and $10 for an adult, and 4 adults "
    "come along. How much do the tickets cost in total?",
    "Nina runs 4 miles on Monday, twice as far on Wednesday, and 3 miles less than on Wednesday on Friday. How many "
    "miles does she run in these three days?",
    "A shop sells candles in packs of 6 for $9. Paul needs 48 candles for a party and has a coupon for $10 off. How "
    "many dollars does he pay?",
    "There are 5 shelves in a library with 32 books each. On Tuesday 47 books are lent out and 19 are brought back. "
    "How many books stand on the shelves then?",
    "A painter needs 3 hours for one room. He works 6 hours a day for 5 days and earns $70 for every room. How much "
    "does he earn?",
)

# Easier ones to show, with their answers: the demo target, often wrong, gets these right, in float32 and in bfloat16.
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
