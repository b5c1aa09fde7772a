"""Is there a place where it matters which server a device uses? Looks through places whose servers differ.

Servers differ in compute and in bandwidth, by factors to either side of a middle; places are small or large; devices
stay, or walk while they decode. Token ids are sent, shares are equal. Each cell is planned for a few drawn places and
run on virtual clocks. What counts is what matching saves on the best of the other associations, place by place. A
search takes minutes. With --batched servers verify for all their devices in one pass (`edge_batches.py`), instead of
dividing their compute. Places of `card plan --edge-place` are then run on seeds that the search has not seen. Nothing
depends on the machine.

python benchmarks/planner/edge_places.py --search
python benchmarks/planner/edge_places.py --out benchmarks/results/edge_places.jsonl
python benchmarks/planner/edge_places.py --batched --walk 0,100 --out benchmarks/results/edge_batched.jsonl
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
import numpy as np
from edge_batches import batched_plain_seconds, batched_seconds, shortest_pass
from msgspec.structs import replace
from options import append_lines, describe_run
from rich.console import Console
from rich.table import Table

from card.tools.planner.edge.association import POLICIES, associate
from card.tools.planner.edge.costs import OVERLAPS, EdgeCosts, Overlap, edge_costs
from card.tools.planner.edge.scenario import PLACES, Devices, Scenario, ServerSpread, draw_scenario, snr, spread_out
from card.tools.planner.edge.study import NUM_TOKENS, all_shares, half_range, judge_shares, plain_seconds
from card.tools.planner.edge.terms import terms_of
from card.tools.planner.profile import Profile, load_profile

BANDWIDTHS = ((10e6, 1.0), (1e6, 4.0), (180e3, 4.0), (50e3, 4.0))  # middle in Hz, and the factor
SLOTS = 3  # times at which walking devices are planned for
FIRST_FRESH_SEED = 100  # the search has seen those from 0 on
HELD, SHORTEST = "matching, held", "shortest-pass"


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of place, and how it is decoded."""

    overlap: Overlap
    place: str  # by its name, or "search" for an even one that is spread out
    spread: ServerSpread | None
    walk_m: float  # from one time to the next


def cells() -> Iterator[Cell]:
    """Yield what is looked through."""
    for compute, (middle, width), scale, walk_m in product((2.0, 8.0), BANDWIDTHS, (1.0, 3.0), (0.0, 100.0)):
        spread = ServerSpread(compute=compute, bandwidth_hz=middle, bandwidth=width, scale=scale)
        for overlap in OVERLAPS:
            yield Cell(overlap, "search", spread, walk_m)


def walked(scenario: Scenario, metres: float, seed: int) -> Scenario:
    """Return the place after each device has gone so far, each in a direction of its own."""
    angles = np.random.default_rng([seed, 2]).uniform(0.0, 2.0 * math.pi, len(scenario.devices)).tolist()
    steps = zip(scenario.devices, angles, strict=True)
    return replace(
        scenario,
        devices=tuple(
            replace(one, x_m=one.x_m + metres * math.cos(angle), y_m=one.y_m + metres * math.sin(angle))
            for one, angle in steps
        ),
    )


def all_in_reach(scenario: Scenario) -> Scenario:
    """Return the place with a limit of reach so low that each device has a server, as in large ones it must be."""
    best_db = 10.0 * np.log10(snr(scenario).max(axis=1))
    return replace(scenario, least_snr_db=min(scenario.least_snr_db, float(best_db.min())))


def seconds_of(
    cell: Cell, profiles: tuple[Profile, Profile], count: int, seed: int, *, is_batched: bool = False
) -> dict[str, float]:
    """Return seconds a token in one drawn place, for each association and for the servers alone."""
    begun = draw_scenario(count, seed=seed)
    begun = begun if cell.spread is None else spread_out(begun, cell.spread)
    slots = [all_in_reach(walked(begun, cell.walk_m * slot, seed)) for slot in range(SLOTS if cell.walk_m else 1)]
    found: dict[str, list[float]] = {}
    held: Devices | None = None
    for scenario in slots:
        costs = edge_costs(scenario, *profiles, cell.overlap)
        terms = terms_of(costs)
        chosen = {policy: associate(costs, terms, policy, seed=seed) for policy in POLICIES}
        held = chosen["matching"] if held is None else _still_in_reach(costs, held)
        chosen[HELD] = held
        if is_batched:
            chosen[SHORTEST] = shortest_pass(costs, profiles[0])
            judged = {name: batched_seconds(costs, one, profiles[0], NUM_TOKENS) for name, one in chosen.items()}
            judged["no drafters"] = batched_plain_seconds(costs, chosen[SHORTEST], profiles[0])
        else:
            shared = ((name, one, all_shares(terms, one, "equal")) for name, one in chosen.items())
            judged = {name: judge_shares(costs, one, *shares)[0] for name, one, shares in shared}
            judged["no drafters"] = plain_seconds(costs, terms)
        for name, seconds in judged.items():
            found.setdefault(name, []).append(seconds)
    return {name: fmean(times) for name, times in found.items()}


def _still_in_reach(costs: EdgeCosts, servers: Devices) -> Devices:
    """Return the servers, with the best signal for those who walked out of reach."""
    devices = np.arange(len(servers))
    return np.where(costs.reach[devices, servers] > 0.0, servers, np.argmin(costs.upload_s, axis=1))


def line_of(cell: Cell, places: list[dict[str, float]]) -> dict[str, Any]:
    """Return the means of a cell, and what matching saves on the best of the others with its 95 % range."""
    means = {name: fmean(place[name] for place in places) for name in places[0]}
    others = [*(policy for policy in POLICIES if policy != "matching"), *([SHORTEST] if SHORTEST in means else [])]
    best = min(others, key=lambda policy: means[policy])
    saved = [1.0 - place["matching"] / place[best] for place in places]
    return {
        "overlap": cell.overlap,
        "place": cell.place,
        "walk_m": cell.walk_m,
        "spread": None if cell.spread is None else asdict(cell.spread),
        "places": len(places),
        "ms_a_token": {name: round(1e3 * seconds, 2) for name, seconds in means.items()},
        "best_other": best,
        "saved_on_best": round(fmean(saved), 4),
        "saved_range_95": round(half_range(saved), 4),
    }


def surely_saved(line: dict[str, Any]) -> float:
    """Return the lower end of the range of what is saved."""
    return float(line["saved_on_best"] - line["saved_range_95"])


@click.command()
@click.option("--devices", default=30, show_default=True, help="Devices of a place.")
@click.option("--search", is_flag=True, help="Look through all cells instead of the named places.")
@click.option("--batched", is_flag=True, help="Servers verify for all their devices in one pass.")
@click.option("--walk", default="0", show_default=True, help="Metres between two times at which is planned.")
@click.option("--places", default=24, show_default=True, help="Places drawn for each cell; 6 are enough for a search.")
@click.option("--target", default="llama-3.1-70b-4xh100", show_default=True, help="Profile of the target.")
@click.option("--draft", default="llama-3.2-1b-h100", show_default=True, help="Profile of the draft model.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def main(
    devices: int, search: bool, batched: bool, walk: str, places: int, target: str, draft: str, out: Path | None
) -> None:
    """Print what matching saves in each cell, the surest saving first."""
    profiles, run = (load_profile(target), load_profile(draft)), describe_run()
    walks = [float(metres) for metres in walk.split(",")]
    named = (Cell(way, name, spread, metres) for name, spread in PLACES.items() for way in OVERLAPS for metres in walks)
    first = 0 if search else FIRST_FRESH_SEED
    found = []
    for cell in cells() if search else named:
        seeds = range(first, first + places)
        line = line_of(cell, [seconds_of(cell, profiles, devices, seed, is_batched=batched) for seed in seeds])
        print(cell, f"{100 * line['saved_on_best']:.1f} +- {100 * line['saved_range_95']:.1f} %", flush=True)
        if out is not None:
            append_lines(
                out,
                [
                    {
                        "benchmark": "edge_places",
                        "devices": devices,
                        "first_seed": first,
                        "batched": batched,
                        **line,
                        **run,
                    }
                ],
            )
        found.append(line)
    table = Table("overlap", "place", "spread", "walk", "best other", "saved", "+-")
    for line in sorted(found, key=surely_saved, reverse=True):
        spread = ", ".join(f"{name} {value:g}" for name, value in (line["spread"] or {}).items())
        saved = (f"{100 * line[name]:.1f} %" for name in ("saved_on_best", "saved_range_95"))
        table.add_row(line["overlap"], line["place"], spread, f"{line['walk_m']:g}", line["best_other"], *saved)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
