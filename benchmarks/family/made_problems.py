"""Write word problems of the kind that the demo target often solves, with their answers, as JSON lines in GSM8K's form.

    python benchmarks/family/made_problems.py --count 400 --seed 0 > train.jsonl

Seven templates with drawn names and numbers; the same seed gives the same problems.
"""

from __future__ import annotations

import argparse
import json
import random

NAMES = {"she": ("Anna", "Lucy", "Mira", "Sara", "Kate", "Nina"), "he": ("Tom", "Paul", "Omar", "Dan", "Leo", "Ben")}


def made(draw: random.Random) -> tuple[str, int]:
    """Return a problem and its answer."""
    who = draw.choice(("she", "he"))
    name, they = draw.choice(NAMES[who]), who.capitalize()
    a, b, c, d = (draw.randint(*between) for between in ((3, 9), (4, 12), (2, 7), (5, 20)))
    money = draw.choice((40, 50, 60, 80, 100))
    fruit = draw.choice(("apples", "plums", "cookies"))
    things = draw.sample(("bag", "book", "lamp", "vase", "game", "cap"), 2)
    return draw.choice(
        (
            (
                f"{name} has {money} {fruit}. {they} eats {a} {fruit} and gives {b} {fruit} to a friend. "
                f"How many {fruit} does {who} have left?",
                money - a - b,
            ),
            (
                f"{name} bakes {a} trays of cookies with {b} cookies on each tray. {they} sells them for ${c} each. "
                f"How much money does {who} make?",
                a * b * c,
            ),
            (
                f"{name} works {a} hours a day and earns ${d} per hour. How much does {who} earn in {c} days?",
                a * d * c,
            ),
            (
                f"{name} fills {a} boxes of {fruit} with {b} {fruit} in each box. {they} gives {c} {fruit} to the "
                f"neighbors. How many {fruit} does {who} have left?",
                a * b - c,
            ),
            (
                f"{name} has ${money}. {they} buys a {things[0]} for ${b} and a {things[1]} for ${d}. "
                f"How much money does {who} have left?",
                money - b - d,
            ),
            (
                f"{name} has {c} hens. Each hen eats {a} scoops of corn per day. "
                f"How many scoops of corn does {who} need for {b} days?",
                a * b * c,
            ),
            (
                f"{name} buys {c} shirts for ${d} each and {a} hats for ${b} each. How much does {who} spend in total?",
                c * d + a * b,
            ),
        )
    )


def main() -> None:
    """Print as many problems as were asked for, all different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    args = parser.parse_args()
    draw, found = random.Random(args.seed), dict[str, int]()
    while len(found) < args.count:
        found.setdefault(*made(draw))
    for question, answer in found.items():
        print(json.dumps({"question": question, "answer": f"#### {answer}"}))


if __name__ == "__main__":
    main()
