"""What Python takes around the passes of both models: of a round, a further request, a drafted layer, an asked writer.

The real engine decodes with the demo pair, whose target is inflated so that its weights drive all else from the caches.
A round is what the main thread computes in `Engine.step` beyond the models' passes: processor time, so that whoever
else uses the core does not count. The engine's own clock is virtual and prices are typed in, so every run takes the
same decisions. Function calls of a round are counted, too: no machine changes that figure.

    python benchmarks/engine/round_overheads.py  # appends a line that policy_gate.py charges from then on
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
import msgspec
import numpy as np
from options import append_lines, describe_run, load_target, numbers
from policy_texts import recording_of
from rich.console import Console
from rich.table import Table

from card.assembly.build import Models, Parts, build
from card.assembly.drafters import link_here
from card.assembly.plan import Facts, Plan, resolve
from card.backends.transformers.loading import load_model
from card.config import SamplingParams, Schedule
from card.drafting.draft_writers import make_writer
from card.engine.request import Request
from card.machine.pass_cost import PassCost
from card.machine.threads import CorePlan
from card.models.protocol import Extension, LanguageModel
from card.models.runners import make_runner
from card.tools.planner.profile import Overheads
from card.tools.planner.virtual_time import VirtualClock

RESULTS = Path(__file__).parents[1] / "results" / "round_overheads.jsonl"
LENGTHS = (1, 4, 8)  # of `sps`, which tell a round and a layer apart
NUM_TOKENS, NUM_WARM_UP, MOST_ROUNDS = 112, 3, 20  # of each request; rounds of an engine: left out at first, and taken
ROOM_BYTES = 1 << 32  # for the KV of the drafter
NEAR = 0.05  # by which the median of `off` may be above plain decoding's, and that of a layer above that of `sps`
TARGET_COST = PassCost(((1, 3e-3), (8, 3.2e-3), (64, 17.6e-3)))
CHEAP, DEAR = PassCost(((1, 2e-4), (64, 8e-4))), PassCost(((1, 6e-3), (64, 4e-2)))  # drafting pays, or never does


@dataclass(frozen=True, slots=True)
class Row:
    """One way to decode."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    draft_cost: PassCost = CHEAP

    @property
    def drafts(self) -> bool:
        """Whether the draft model is there."""
        return self.method in ("card", "sps")

    @property
    def rests(self) -> bool:
        """Whether the draft model is there and hardly ever asked."""
        return self.draft_cost is DEAR


ROWS: Mapping[str, Row] = {
    "plain": Row("vanilla"),
    "card, off": Row("card", {"writers": ("beam",)}, DEAR),
    **{f"sps {length}": Row("sps", {"policy": "fixed", "num_speculative_tokens": length}) for length in LENGTHS},
    "card, turns": Row("card", {"writers": ("beam",), "schedule": "turns"}),
    "card, all writers": Row("card", {"schedule": "turns"}),
    "suffix, fixed": Row("suffix", {"policy": "fixed"}),
    "suffix": Row("suffix"),
}


@dataclass(slots=True)
class Round:
    """One round in which all requests decoded."""

    seconds: float = 0.0  # of the main thread, beyond passes
    layers: int = 0  # passes of the drafter
    verifying: int = 0  # requests with candidates
    candidates: int = 0
    calls: int = 0  # of Python functions, where they were counted


@dataclass(frozen=True, slots=True)
class Pair:
    """The models, and the prompts to decode."""

    target: LanguageModel
    draft: LanguageModel
    prompts: Sequence[tuple[int, ...]]

    def shifted(self, places: int) -> Pair:
        """Return the same with other prompts first."""
        start = places % len(self.prompts)
        return Pair(self.target, self.draft, (*self.prompts[start:], *self.prompts[:start]))


class _Outside:
    """A model whose passes are outside of what is measured, and take virtual seconds of the engine's clock."""

    def __init__(self, inner: LanguageModel, cost: PassCost, clock: VirtualClock) -> None:
        self._inner, self._cost, self._clock = inner, cost, clock
        self.spent_s, self.sizes = 0.0, list[list[int]]()  # logits of each sequence in each pass of the round

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, extensions: Sequence[Extension]) -> Any:
        """Run a pass."""
        profiler, started = sys.getprofile(), time.thread_time()
        sys.setprofile(None)
        found = self._inner.forward(extensions)
        self.sizes.append([len(one.token_ids) - one.first_logits_idx for one in extensions])
        self._clock.advance(self._cost.seconds(sum(len(one.token_ids) for one in extensions), len(extensions)))
        self.spent_s += time.thread_time() - started
        sys.setprofile(profiler)
        return found


@dataclass(frozen=True, slots=True)
class _Prices:
    """What the engine is told that passes cost."""

    draft_cost: PassCost

    def with_useful_threads(self, cores: CorePlan) -> CorePlan:
        return cores

    def target(self, plan: Plan, schedule: Schedule) -> PassCost:
        return TARGET_COST

    def drafter(self, plan: Plan, schedule: Schedule) -> PassCost | None:
        return self.draft_cost


class Stage:
    """An engine of one row, and its models."""

    def __init__(self, row: Row, pair: Pair, at_once: int) -> None:
        clock, prices = VirtualClock(), _Prices(row.draft_cost)
        facts = Facts(has_draft=row.drafts, is_draft_loaded=row.drafts, latencies=prices)
        at_first = {"max_num_seqs": at_once, "prefill_chunk": sum(map(len, pair.prompts))}  # all decode from then on
        plan = resolve({**at_first, **row.settings}, facts, method=row.method)
        self.target, self.draft = _Outside(pair.target, TARGET_COST, clock), _Outside(pair.draft, row.draft_cost, clock)
        link = (
            link_here("inline", make_writer(self.draft, ROOM_BYTES, takes_turns=True), clock=clock)
            if row.drafts
            else None
        )
        self.parts: Parts = build(plan, Models(target=self.target, link=link, latencies=prices), clock=clock)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True).resolved()
        for request_id, prompt_ids in enumerate(pair.prompts[:at_once]):
            request = Request(
                request_id=request_id,
                prompt_ids=prompt_ids,
                params=params,
                draft=plan.draft,
                end_ids=frozenset(),
                uses_drafter=row.drafts,
            )
            self.parts.engine.add(self.parts.engine.check(request))
        self._at_once = at_once

    def rounds(self, *, counts_calls: bool = False) -> Iterator[Round]:
        """Yield the first rounds in which all requests decode, but for the very first ones; then end the requests."""
        engine, num_seen = self.parts.engine, 0
        while num_seen < NUM_WARM_UP + MOST_ROUNDS:
            found, count = Round(), [0]
            for model in (self.target, self.draft):
                model.spent_s, model.sizes = 0.0, []
            started = time.thread_time()
            if counts_calls:
                gc.disable()  # what it finds of others would be counted
                sys.setprofile(partial(_count, count))
            updates = engine.step()
            sys.setprofile(None)
            gc.enable()
            found.seconds = time.thread_time() - started - self.target.spent_s - self.draft.spent_s
            verified = self.target.sizes[-1]
            found.layers, found.calls = len(self.draft.sizes), count[0]
            found.verifying, found.candidates = sum(size > 1 for size in verified), sum(size - 1 for size in verified)
            if any(update.finish_reason is not None for update in updates):
                break
            num_seen += len(updates) == self._at_once
            if len(updates) == self._at_once and num_seen > NUM_WARM_UP:
                yield found
        for request_id in range(self._at_once):
            engine.abort(request_id)
        engine.forget_prefixes()
        self.parts.close()


def _count(count: list[int], _frame: object, event: str, _arg: object) -> None:
    count[0] += event == "call"


def measure(pair: Pair, at_once: int, num_rounds: int) -> dict[str, list[Round]]:
    """Return rounds of all rows, at least so many of each; rows take turns, so that a busy moment meets them all."""
    found: dict[str, list[Round]] = {name: [] for name in ROWS}
    shift = 0
    while any(len(rounds) < num_rounds for rounds in found.values()):
        for name, row in ROWS.items():
            rounds = Stage(row, pair.shifted(shift), at_once).rounds()
            found[name] += (one for one in rounds if not (row.rests and one.layers))  # a try now and then is none of it
        shift += at_once
    return found


@dataclass(frozen=True, slots=True)
class Around:
    """Microseconds around the rounds of a row with so many requests at once."""

    row: str
    at_once: int
    rounds: int
    quartile_us: float
    median_us: float
    layers: float  # mean
    verifying: float  # mean
    candidates: float  # mean, of a request
    calls: float  # of Python functions, median
    layer_us: float  # of each layer, where rounds have different numbers of them; else 0


def summary(name: str, at_once: int, rounds: Sequence[Round], calls: Sequence[int]) -> Around:
    """Return the figures of a row."""
    times = [1e6 * one.seconds for one in rounds]
    quartile, median, _ = statistics.quantiles(times, n=4)
    return Around(
        row=name,
        at_once=at_once,
        rounds=len(rounds),
        quartile_us=round(quartile, 1),
        median_us=round(median, 1),
        layers=round(statistics.fmean(one.layers for one in rounds), 2),
        verifying=round(statistics.fmean(one.verifying for one in rounds), 2),
        candidates=round(statistics.fmean(one.candidates for one in rounds) / at_once, 2),
        calls=statistics.median(calls),
        layer_us=round(line_through([(one.layers, 1e6 * one.seconds) for one in rounds])[1], 1),
    )


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (value at 0, slope) of the line through the medians at each place, each as heavy as it has points."""
    places = sorted({x for x, _ in points})
    found = [[y for x, y in points if x == place] for place in places]
    if len(places) < 2:
        return statistics.median(found[0]), 0.0
    weights = [len(ys) ** 0.5 for ys in found]
    slope, start = np.polyfit(places, [statistics.median(ys) for ys in found], 1, w=weights)
    return float(start), float(slope)


class Figures:
    """What a round is made of, from all rows. Seconds; what comes out below 0 is noise and counts as 0."""

    def __init__(self, found: Sequence[Around]) -> None:
        self._at = {(one.row, one.at_once): one for one in found}
        self._counts = sorted({one.at_once for one in found})

    def overheads(self) -> Overheads:
        """Return what the planner and the gate charge."""
        plain, drafted = self._line(self._plain), self._line(lambda n: self._drafted(n) - self._plain(n))
        off = self._line(lambda n: self._off(n) - self._plain(n))
        step, tuned_step = (
            self._line(self._layer),
            self._line(lambda n: self._tuned_layer(n) - self._layer(n), self._drafting),
        )
        turns = self._line(lambda n: self._turns(n) - self._drafted(n) - self._off(n) + self._plain(n), self._drafting)
        each = statistics.median(self._writer(n, drafted[1]) for n in self._counts)
        seconds = {
            "round_s": sum(plain),
            "request_s": plain[1],
            "drafted_s": drafted[0],
            "drafted_request_s": drafted[1],
            "step_s": step[0],
            "node_s": step[1],
            "tuned_s": sum(off),
            "tuned_request_s": off[1],
            "tuned_drafted_s": sum(turns),
            "tuned_drafted_request_s": turns[1],
            "tuned_step_s": tuned_step[0],
            "tuned_node_s": tuned_step[1],
        }
        told = {name: round(1e-6 * max(0.0, value), 8) for name, value in seconds.items()}
        by_writer = {"suffix": round(1e-6 * max(0.0, each), 8)}
        return Overheads(**told, by_writer=by_writer, commit_s=0.0, source="benchmarks/engine/round_overheads.py")

    def _line(self, of: Callable[[int], float], counts: Sequence[int] = ()) -> tuple[float, float]:
        """Return (value without requests, slope) of a figure over requests at once; few of them count for more."""
        chosen = list(counts or self._counts)
        if len(chosen) < 2:
            return of(chosen[0]), 0.0
        slope, start = np.polyfit(chosen, [of(count) for count in chosen], 1, w=[1 / count for count in chosen])
        return float(start), float(slope)

    @property
    def _drafting(self) -> list[int]:
        """Numbers of requests at once with which the tuned policy drafts in most rounds."""
        return [count for count in self._counts if self._at["card, turns", count].layers >= 0.5]

    def _plain(self, at_once: int) -> float:
        return self._at["plain", at_once].median_us

    def _off(self, at_once: int) -> float:
        return self._at["card, off", at_once].median_us

    def _sps(self, at_once: int) -> tuple[float, float]:
        """Return (a round that drafts no layer, each layer) of sequential speculation."""
        rows = [self._at[f"sps {length}", at_once] for length in LENGTHS]
        return line_through([(row.layers, row.median_us) for row in rows])

    def _drafted(self, at_once: int) -> float:
        return self._sps(at_once)[0]

    def _layer(self, at_once: int) -> float:
        return self._sps(at_once)[1]

    def _turns(self, at_once: int) -> float:
        row = self._at["card, turns", at_once]
        return row.median_us - row.layers * self._tuned_layer(at_once)

    def _tuned_layer(self, at_once: int) -> float:
        """Return what a layer takes; that of `sps` where all rounds have as many of them."""
        return self._at["card, turns", at_once].layer_us or self._layer(at_once)

    def _writer(self, at_once: int, verified_us: float) -> float:
        """Return what asking a writer for all that it may propose takes, by what fewer candidates took."""
        row = self._at["suffix, fixed", at_once]
        beyond = (row.median_us - self._plain(at_once) - row.verifying * verified_us) / at_once
        return beyond / Overheads(by_writer={"suffix": 1.0}).of_proposal("suffix", round(row.candidates))

    def marks(self) -> list[str]:
        """Return what is dearer than it should be: no more than plain decoding, or than sequential speculation."""
        told = []
        for what, row, own, other, counts in (
            ("a round of off", "plain", self._off, self._plain, self._counts),
            ("a layer of card", "sps", self._tuned_layer, self._layer, self._drafting),
        ):
            for count in counts:
                if own(count) > (1 + NEAR) * other(count):
                    times = own(count) / other(count)
                    told.append(
                        f"{what} takes {own(count):.0f} us with {count} at once, {times:.2f} times that of {row}"
                    )
        return told


@click.command()
@click.option("--rounds", default=100, show_default=True, help="Rounds of each row and number of requests, at least.")
@click.option("--at-once", default="1,4,16,32", show_default=True, help="Numbers of requests, several.")
@click.option("--cost", default="90M", show_default=True, help="Parameters that the target is inflated to.")
@click.option("--out", type=Path, default=RESULTS, show_default=True, help="A JSON line is appended to it.")
def main(rounds: int, at_once: str, cost: str, out: Path) -> None:
    """Measure all rows, print tables, and say whether `off` is plain decoding."""
    console, facts = Console(width=130), describe_run()
    target = make_runner(load_target("demo-target", "int8", cost), max_model_len=320)
    draft = make_runner(load_model("demo-draft", dtype="int8"), max_model_len=320)
    prompts = [text.prompt_ids for kind in ("questions", "code", "copy-edit") for text in recording_of(kind).texts]
    prompts.sort(key=len)  # where few are wanted, those that are read at once
    pair, found = Pair(target, draft, prompts), list[Around]()
    for count in numbers(at_once):
        console.print(f"{count} at once", style="dim")
        for name, measured in measure(pair, count, rounds).items():
            counted = Stage(ROWS[name], pair, count).rounds(counts_calls=True)
            found.append(summary(name, count, measured, [one.calls for one in counted]))
    table = Table(*Around.__slots__)
    for one in found:
        table.add_row(*(str(value) for value in asdict(one).values()))
    console.print(table)
    figures = Figures(found)
    overheads, marks = msgspec.to_builtins(figures.overheads()), figures.marks()
    console.print("\n".join(f"{name} {1e6 * value:.1f} us" for name, value in overheads.items() if name.endswith("_s")))
    console.print("\n".join(["FAIL", *marks]) if marks else "PASS")
    rows = [asdict(one) for one in found]
    append_lines(out, [{"benchmark": "round_overheads", "rows": rows, "overheads": overheads, "marks": marks, **facts}])


if __name__ == "__main__":
    main()
