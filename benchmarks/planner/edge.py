"""What do associations and shares save at the edge, for 30 to 180 devices, and when does the radio matter?

Two payloads: token ids, as verification by strict match needs, and the draft model's probabilities besides, as a coin
between both models' probabilities would need. All is planned and run on virtual clocks, so nothing depends on the
machine.

python benchmarks/planner/edge.py --out benchmarks/results/edge.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).parents[1]))
import click
import msgspec
import torch
from edge_agents import Actor, ActorSettings, Place, train_actor
from options import append_lines, describe_run
from rich.console import Console
from rich.table import Table

from card.tools.planner.edge.association import POLICIES, associate
from card.tools.planner.edge.costs import EdgeCosts, Overlap, edge_costs
from card.tools.planner.edge.scenario import draw_scenario
from card.tools.planner.edge.shares import Rule
from card.tools.planner.edge.study import all_shares, half_range, judge_shares, plain_seconds
from card.tools.planner.edge.terms import Terms, terms_of
from card.tools.planner.profile import Profile, load_profile

IDS, PROBABILITIES = 4, 2 * 50_257  # bytes of a drafted token: its id, or GPT-2's vocabulary in 16 bits
CASES: tuple[tuple[Overlap, str, int], ...] = (
    ("pearl", "ids", IDS),
    ("card", "ids", IDS),
    ("pearl", "probabilities", PROBABILITIES),
)
RULES: tuple[Rule, ...] = ("equal", "convex")
BASELINES = frozenset(POLICIES) - {"matching"}
TRAINING_DEVICES, TRAINING_PLACES, FIRST_TRAINING_SEED = 18, 6, 1000


@click.command()
@click.option("--devices", default="30,60,120,180", show_default=True, help="Numbers of devices.")
@click.option("--places", default=4, show_default=True, help="Places drawn for each number.")
@click.option("--target", default="llama-3.1-70b-4xh100", show_default=True, help="Profile of the target.")
@click.option("--draft", default="llama-3.2-1b-h100", show_default=True, help="Profile of the draft model.")
@click.option("--steps", default=800, show_default=True, help="Updates of the agents.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def main(devices: str, places: int, target: str, draft: str, steps: int, out: Path | None) -> None:
    """Print latency, its range and what is saved, for each case."""
    torch.set_num_threads(1)
    profiles = load_profile(target), load_profile(draft)
    table = Table("overlap", "sent", "devices", "servers by", "shares", "ms a token", "+-", "saved")
    for overlap, sent, token_bytes in CASES:
        training = [
            _priced(profiles, overlap, token_bytes, TRAINING_DEVICES, FIRST_TRAINING_SEED + i)
            for i in range(TRAINING_PLACES)
        ]
        seen = [Place.of(costs, terms, associate(costs, terms, "matching")) for costs, terms in training]
        print(overlap, sent, "training agents", flush=True)
        actor = train_actor(seen, ActorSettings(steps=steps))
        for count in map(int, devices.split(",")):
            for line in _lines(profiles, overlap, token_bytes, count, places, actor):
                table.add_row(overlap, sent, *map(str, line.values()))
                if out is not None:
                    append_lines(out, [{"overlap": overlap, "sent": sent, "places": places, **line, **describe_run()}])
    Console(width=110).print(table)


def _priced(
    profiles: tuple[Profile, Profile], overlap: Overlap, token_bytes: int, count: int, seed: int
) -> tuple[EdgeCosts, Terms]:
    scenario = msgspec.structs.replace(draw_scenario(count, seed=seed), token_bytes=token_bytes)
    costs = edge_costs(scenario, *profiles, overlap)
    return costs, terms_of(costs)


def _lines(
    profiles: tuple[Profile, Profile], overlap: Overlap, token_bytes: int, count: int, places: int, actor: Actor
) -> list[dict[str, float | int | str]]:
    """Return a line for each association and rule of shares, and one for the servers alone."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for seed in range(places):
        costs, terms = _priced(profiles, overlap, token_bytes, count, seed)
        seconds.setdefault(("most-compute", "no drafters"), []).append(plain_seconds(costs, terms))
        for policy in POLICIES:
            servers = associate(costs, terms, policy, seed=seed)
            shares = {rule: all_shares(terms, servers, rule) for rule in RULES}
            if policy == "matching":
                shares["actor-critic"] = actor.shares(costs, terms, servers)  # type: ignore[index]
            for rule, pair in shares.items():
                seconds.setdefault((policy, rule), []).append(judge_shares(costs, servers, *pair)[0])
        print(overlap, token_bytes, count, "devices, place", seed, flush=True)
    usual = fmean(fmean(times) for (policy, rule), times in seconds.items() if policy in BASELINES and rule == "equal")
    return [
        {
            "devices": count,
            "servers_by": policy,
            "shares": rule,
            "ms_a_token": round(1e3 * fmean(times), 2),
            "range_95_ms": round(1e3 * half_range(times), 2),
            "saved": round(1.0 - fmean(times) / usual, 4),
        }
        for (policy, rule), times in seconds.items()
    ]


if __name__ == "__main__":
    main()
