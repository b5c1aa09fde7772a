"""Does a server stay fast all day? One engine answers a day's requests on the planner's clock, beside fixed rows.

Chats, code, copies, sampled answers and an agent's long prompts come in an order that a seed draws, 1, 4 and 16 at
once. The tuned policy and each fixed row (plain decoding, `suffix`, `sps` with each length) answer the same requests in
the same order, each on an engine of its own that lives all day. So each request has its fixed rows in the same place of
the same order. The clock is virtual, so a busy machine changes no figure.

    python benchmarks/engine/day.py --name NAME --jobs 2
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
import msgspec
import torch
from day_texts import Day, Episode, make_day
from options import append_lines, describe_run
from policy_cells import PRICES, setup_of_price
from policy_gate import OVERHEADS, geometric_mean, measured_overheads
from rich.console import Console
from rich.table import Table

from card.errors import PlanError
from card.tools.planner.profile import Overheads, Profile
from card.tools.planner.replayed_texts import ReplayedTexts
from card.tools.planner.scenario import Scenario, build_stage, make_request, plan_method, replayed_texts

RESULTS = Path(__file__).parents[1] / "results" / "day.jsonl"
PRICES_OF_DAYS = ("int8 90M", "dear draft")
LENGTHS = (1, 2, 3, 5, 7)  # of the fixed rows that draft
ROWS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "card": ("card", {}),
    "plain": ("vanilla", {}),
    "suffix": ("suffix", {"policy": "fixed"}),
    **{f"sps {n}": ("sps", {"policy": "fixed", "num_speculative_tokens": n}) for n in LENGTHS},
}


@dataclass(slots=True)
class Spent:
    """What the requests of one episode took."""

    num_tokens: int = 0
    seconds: float = 0.0  # from the first request to the end of the last one
    first_token_s: float = 0.0  # the sum over the requests, from their arrival
    longest_gap_s: float = 0.0  # between two tokens of an answer


@dataclass(slots=True)
class _Open:
    text_idx: int
    arrived_at: float
    heard_at: float | None = None
    answer: list[int] = field(default_factory=list)


class Server:
    """One engine that lives all day."""

    def __init__(self, scenario: Scenario, texts: ReplayedTexts, method: str, settings: Mapping[str, Any]) -> None:
        """Start it under a method."""
        self._scenario, self._texts = scenario, texts
        self._stage = build_stage(scenario, plan_method(scenario, method, settings), texts)
        self._num_requests = 0

    def answer(self, episode: Episode) -> Spent:
        """Answer the requests of an episode. Raises: PlanError for a wrong text."""
        spent, clock = Spent(), self._stage.clock
        began, waiting, running = clock(), list(episode.texts), dict[int, _Open]()
        while waiting or running:
            while waiting and len(running) < episode.at_once:
                request = make_request(self._stage, self._scenario, self._texts, waiting[0], self._num_requests)
                self._stage.engine.add(self._stage.engine.check(request))
                running[self._num_requests] = _Open(waiting.pop(0), clock())
                self._num_requests += 1
            self._step(running, spent)
        spent.seconds = clock() - began
        return spent

    def _step(self, running: dict[int, _Open], spent: Spent) -> None:
        for update in self._stage.engine.step():
            if update.error is not None:
                raise update.error
            one, now = running[update.request_id], self._stage.clock()
            if update.token_ids:
                if one.heard_at is None:
                    spent.first_token_s += now - one.arrived_at
                else:
                    spent.longest_gap_s = max(spent.longest_gap_s, now - one.heard_at)
                one.heard_at = now
            one.answer += update.token_ids
            spent.num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                del running[update.request_id]
                if tuple(one.answer) != self._texts.answers[one.text_idx]:
                    raise PlanError(f"text {one.text_idx} came out otherwise than it was recorded: a bug in card")


def make_scenario(day: Day, price_name: str, overheads: Overheads) -> Scenario:
    """Return the hardware of a day."""
    price = PRICES[price_name]

    def profile(beside: str, alone: str) -> Profile:
        setups = tuple(setup_of_price(n, getattr(price, name), (1, 1)) for n, name in ((1, beside), (2, alone)))
        return Profile(name="day", measured=False, source=price.source, setups=setups, overheads=overheads)

    most = max(episode.at_once for episode in day.episodes)
    return Scenario(
        target=profile("beside", "alone"), draft=profile("draft", "draft"), recording=day.recording, concurrency=most
    )


def run_row(row: str, seed: int, price: str, overheads: Overheads) -> list[Spent]:
    """Return what each episode of a day took under a row."""
    torch.set_num_threads(1)
    day = make_day(seed)
    scenario, (method, settings) = make_scenario(day, price, overheads), ROWS[row]
    server = Server(scenario, replayed_texts(scenario, plan_method(scenario, "card", {})), method, settings)
    return [server.answer(episode) for episode in day.episodes]


def ratios(spent: Mapping[str, Sequence[Spent]], episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """Return, for each class, the speed of `card` over that of plain decoding and of the best fixed row, and more."""
    found = {}
    for name in sorted({episode.name for episode in episodes}):
        places = [place for place, episode in enumerate(episodes) if episode.name == name]
        taken = {row: sum(of_row[place].seconds for place in places) for row, of_row in spent.items()}
        fixed = {row: seconds for row, seconds in taken.items() if row != "card"}
        best, own = min(fixed, key=lambda row: fixed[row]), [spent["card"][place] for place in places]
        plain = [spent["plain"][place] for place in places]
        found[name] = {
            "over_plain": round(taken["plain"] / taken["card"], 4),
            "over_best": round(fixed[best] / taken["card"], 4),
            "best": best,
            "first_token_over_plain": round(
                sum(one.first_token_s for one in own) / sum(one.first_token_s for one in plain), 4
            ),
            "longest_gap_s": round(max(one.longest_gap_s for one in own), 4),
        }
    return found


def last_over_first(spent: Sequence[Spent]) -> float:
    """Return the speed of the day's last copies over that of its first ones, which are the same texts."""
    first, *_, last = (one.num_tokens / one.seconds for one in spent)
    return round(last / first, 4)


@click.command()
@click.option("--name", required=True, help="Name of the policy in the results.")
@click.option("--seeds", default=2, show_default=True, help="Orders of the day.")
@click.option("--price", "prices", multiple=True, default=PRICES_OF_DAYS, show_default=True, help="Prices of passes.")
@click.option("--rows", default=",".join(ROWS), help="Rows to run; the others are taken from --fixed-of.")
@click.option("--fixed-of", help="Take fixed rows as this policy's lines have them.")
@click.option("--out", type=Path, default=RESULTS, show_default=True, help="JSON lines are appended to it.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
def main(name: str, seeds: int, prices: tuple[str, ...], rows: str, fixed_of: str | None, out: Path, jobs: int) -> None:
    """Run the days and print a table of their classes."""
    console, overheads = Console(width=150), measured_overheads(OVERHEADS)
    known = _fixed_of(fixed_of, out) if fixed_of else {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        days = [(price, seed) for price in prices for seed in range(seeds)]
        runs = {
            (price, seed): {
                row: pool.submit(run_row, row, seed, price, overheads)
                for row in (["card"] if (price, seed) in known else rows.split(","))
            }
            for price, seed in days
        }
        for (price, seed), futures in runs.items():
            spent = {**known.get((price, seed), {}), **{row: future.result() for row, future in futures.items()}}
            classes = ratios(spent, make_day(seed).episodes)
            line = {
                "benchmark": "day",
                "policy": name,
                "price": price,
                "seed": seed,
                "classes": classes,
                "last_copies_over_first": last_over_first(spent["card"]),
                "spent": {row: [asdict(one) for one in of_row] for row, of_row in spent.items()},
                "overheads": msgspec.to_builtins(overheads),
                **describe_run(),
            }
            append_lines(out, [line])
            _print(console, price, seed, classes, spent)


def _fixed_of(name: str, path: Path) -> dict[tuple[str, int], dict[str, list[Spent]]]:
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {
        (line["price"], line["seed"]): {
            row: [Spent(**one) for one in spent] for row, spent in line["spent"].items() if row != "card"
        }
        for line in lines
        if line["policy"] == name
    }


def _print(console: Console, price: str, seed: int, classes: Mapping[str, Any], spent: Mapping[str, Any]) -> None:
    table = Table("class", "/ plain", "/ best", "best", "first token / plain", "longest gap")
    for name, one in classes.items():
        table.add_row(name, *(str(value) for value in one.values()))
    console.print(f"{price}, order {seed}")
    console.print(table)
    whole = {row: sum(one.seconds for one in of_row) for row, of_row in spent.items()}
    console.print("seconds of the day: " + ", ".join(f"{row} {seconds:.0f}" for row, seconds in whole.items()))
    console.print(f"the last copies over the first: {last_over_first(spent['card'])}")
    for kind in ("over_plain", "over_best"):
        console.print(f"mean {kind}: {geometric_mean(one[kind] for one in classes.values()):.3f}")


if __name__ == "__main__":
    main()
