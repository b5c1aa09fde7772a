"""Cells of the policy gate: which text, at which prices, in runs of which size; and the fixed rows to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from policy_texts import MADE_UP, RECORDED, distinct_recording, recording_of

from card.errors import PlanError
from card.tools.planner.profile import Overheads, PassTable, Profile, Setup
from card.tools.planner.replayed_texts import ReplayedTexts
from card.tools.planner.scenario import Scenario, build_stage, make_request, plan_method, replayed_texts

Times = tuple[float, ...]
SIZES = (1, 4, 8, 16, 32, 64)  # tokens of the passes below


@dataclass(frozen=True, slots=True)
class Price:
    """Milliseconds of passes of each size."""

    alone: Times  # of the target on all cores
    beside: Times  # of the target beside a drafter
    draft: Times  # of the drafter beside the target
    source: str
    in_turns: Times | None = None  # of the drafter on all cores; None: as beside, as it gains nothing by more threads
    has_spare: bool = False  # a core for a drafter beside the target, which may miss it or not

    @property
    def row_s(self) -> float:
        """Seconds of the target for one more row of many."""
        return 1e-3 * (self.alone[-1] - self.alone[-2]) / (SIZES[-1] - SIZES[-2])


DEMO_DRAFT = (0.14, 0.17, 0.20, 0.27, 0.45, 0.80)
INT8 = (2.80, 2.83, 3.12, 5.10, 9.2, 17.6)
ZEN4 = "AMD EPYC (Zen 4), two threads and one, 2026-11"
PRICES: Mapping[str, Price] = {
    # On one thread a pass of one token took 4.9 ms: 1.75 times as long, which is taken for all sizes where nothing else
    # is said.
    "int8 90M": Price(INT8, (4.9, 4.95, 5.5, 8.9, 16.1, 30.8), DEMO_DRAFT, f"{ZEN4}: card profile of a quiet moment"),
    "Q4_0 90M": Price(
        (1.9, 2.2, 3.4, 6.2, 11.5, 22.0),
        (3.45, 4.0, 6.15, 11.2, 21.0, 40.0),
        DEMO_DRAFT,
        f"{ZEN4}: LOG.md, threads that share out rows; a second core takes 45 % off",
    ),
    "Q4_0 AVX2 90M": Price(
        (2.5, 3.3, 5.8, 9.9, 19.0, 37.0),
        (4.5, 6.0, 10.6, 17.9, 34.0, 67.0),
        (0.3, 0.35, 0.4, 0.55, 0.95, 1.7),
        "Zen 4 held to AVX2: LOG.md, why the tuned policy was behind; a second core takes 45 % off",
    ),
    "int8 300M": Price(
        (9.2, 10.5, 14.1, 18.3, 30.0, 54.0),
        (16.0, 18.5, 24.5, 32.0, 53.0, 95.0),
        (0.7, 0.8, 1.0, 1.25, 1.9, 3.2),
        "AMD EPYC, two threads: LOG.md, passes of 1, 8 and 16 rows",
    ),
    "bf16 300M": Price(
        (11.0, 13.0, 15.6, 21.5, 36.0, 66.0),
        (18.0, 22.0, 27.0, 39.0, 67.0, 124.0),
        (0.7, 0.8, 1.0, 1.25, 1.9, 3.2),
        "the same",
    ),
    "dear draft": Price(
        (33.0, 40.0, 50.0, 68.0, 108.0, 190.0),
        (57.0, 72.0, 92.0, 128.0, 208.0, 370.0),
        (14.0, 17.0, 21.0, 29.0, 48.0, 85.0),
        "Qwen2.5-Coder 1.5 B with 0.5 B in int8, AMD EPYC: LOG.md",
    ),
    "many cores": Price(
        INT8, INT8, DEMO_DRAFT, "int8 90M, with a core for the drafter that the target does not miss", has_spare=True
    ),
    "two devices": Price(
        (20.0, 20.2, 20.5, 21.0, 22.5, 26.0),
        (20.0, 20.2, 20.5, 21.0, 22.5, 26.0),
        (2.2, 2.2, 2.2, 2.3, 2.4, 2.6),
        "card.tools.planner's profiles of a 70 B model, rounded",
        has_spare=True,
    ),
    "hopeless draft": Price(
        INT8,
        (4.9, 4.95, 5.5, 8.9, 16.1, 30.8),
        (5.6, 5.7, 6.2, 10.2, 18.4, 35.2),
        "int8 90M, with a drafter twice as dear as the target: no row that drafts can pay",
    ),
}
CORE_GB_PER_S = 18.0  # that one core reads: 90 MB in the 4.9 ms of a pass on one thread
CORES, BANDWIDTHS = (4, 8, 16), (50.0, 200.0)  # of machines that were not measured; GB/s of all cores together


def price_on(cores: int, gb_per_s: float, *, is_dear: bool) -> Price:
    """Return what passes take by the bytes of the weights and the arithmetic of rows, whichever takes longer.

    Args:
        gb_per_s: that all cores together read.
        is_dear: of Qwen2.5-Coder 1.5 B with 0.5 B in Q4_K_M, else of the demo pair at 90 M.
    """

    def times(giga_bytes: float, row_ms: float, threads: int) -> Times:
        reading_ms = 1e3 * giga_bytes / min(threads * CORE_GB_PER_S, gb_per_s)
        return tuple(round(max(reading_ms, size * row_ms / threads) + 1e-3 * size / threads, 4) for size in SIZES)

    target, draft = ((1.12, 5.0), (0.49, 1.8)) if is_dear else ((0.09, 0.55), (0.0025, 0.012))
    return Price(
        times(*target, cores),
        times(*target, cores - 1),
        times(*draft, 1),
        "computed: 18 GB/s a core, row costs of Zen 4",
        in_turns=times(*draft, cores) if is_dear else None,
        has_spare=True,
    )


ON_CORES: Mapping[str, Price] = {
    f"{cores} cores, {gb_per_s:.0f} GB/s, {'1.5 B' if is_dear else '90M'}": price_on(cores, gb_per_s, is_dear=is_dear)
    for cores in CORES
    for gb_per_s in BANDWIDTHS
    for is_dear in (False, True)
}
# What passes take beyond their prices. The first of a drafter behind one of the target's, whose weights have taken the
# caches: 0.9 ms were measured with the demo draft, 0.45 of each further one. Two models at once slow each other by
# 15 %.
AROUND_MODELS = {"cold_s": 3e-4, "beside_factor": 1.15}
# What a busy machine makes of the measurements at the start: for each of the three costs, by what the pass of one token
# and what each further token is measured to cost is wrong. Passes themselves take what they take.
STARTS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "right": {},
    "slow": {"alone": (2, 2), "beside": (2, 2), "draft": (2, 2)},
    "dear rows": {"alone": (1, 2), "beside": (1, 2)},
    "dear drafting": {"draft": (2, 2)},
    "cheap drafting": {"draft": (0.5, 0.5)},
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is decoded."""

    at_once: int  # requests
    tokens: int  # of each engine, all requests together
    engines: int = 1  # each begins anew, with nothing learnt


SIZES_OF_RUNS: Mapping[str, Size] = {
    "short": Size(1, 150, engines=6),
    "long": Size(1, 1_500),
    "4": Size(4, 2_400),
    "16": Size(16, 4_800),
    "32": Size(32, 8_000),
}
LEARNING_TOKENS = 50  # of each request at once, in each engine: they do not count as later
FIXED_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 10)  # of those up to 12, 8 and 12 were never the best
FIXED_LENGTHS_AT_ONCE = (1, 2, 3, 4, 6)  # with several at once; no longer one was ever the best there


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the matrix."""

    text: str
    price: str
    size: str
    start: str = "right"


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one row."""

    whole: float
    later: float  # without the tokens in which a policy learns
    schedules: Mapping[str, float]  # shares of the rounds


def cells() -> list[Cell]:
    """Return a fifth of all combinations, in which every pair of two properties occurs, and what users have most."""
    axes: tuple[Sequence[str], ...] = ((*RECORDED, *MADE_UP), tuple(PRICES), tuple(SIZES_OF_RUNS))
    places = product(*(range(len(axis)) for axis in axes))
    chosen = [Cell(*(axis[i] for axis, i in zip(axes, place, strict=True))) for place in places if sum(place) % 5 == 2]
    chosen += [Cell(text, "int8 90M", "short") for text in RECORDED]
    wrong = [start for start in STARTS if start != "right"]
    chosen += [Cell("questions", "int8 90M", "short", start) for start in wrong]
    chosen += [Cell("code", "Q4_0 AVX2 90M", "long", start) for start in wrong]
    chosen += [Cell(text, price, size) for price in ON_CORES for text, size in (("questions", "short"), ("code", "4"))]
    return list(dict.fromkeys(chosen))


def price_of(cell: Cell) -> Price:
    """Return what passes take in a cell."""
    return PRICES.get(cell.price) or ON_CORES[cell.price]


def fixed_rows(cell: Cell) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the methods and settings that the policy is compared with; plain decoding is "plain"."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {"plain": ("vanilla", {}), "suffix": ("suffix", {"policy": "fixed"})}
    for length in FIXED_LENGTHS if SIZES_OF_RUNS[cell.size].at_once == 1 else FIXED_LENGTHS_AT_ONCE:
        rows[f"sps {length}"] = ("sps", {"policy": "fixed", "num_speculative_tokens": length})
    if price_of(cell).has_spare:
        rows["beside"] = ("card", {"policy": "fixed", "schedule": "beside", "verify": "tree"})
    return rows


def make_scenario(cell: Cell, overheads: Overheads) -> Scenario:
    """Return the hardware of a cell, with what is measured at its start. Raises: PlanError for a broken recording."""
    price, start, at_once = price_of(cell), STARTS[cell.start], SIZES_OF_RUNS[cell.size].at_once

    def profile(beside: str, alone: str) -> Profile:
        setups = tuple(
            setup_of_price(n, getattr(price, name), start.get(name, (1, 1))) for n, name in ((1, beside), (2, alone))
        )
        return Profile(name="gate", measured=False, source=price.source, setups=setups, overheads=overheads)

    return Scenario(
        target=profile("beside", "alone"),
        draft=profile("draft", "in_turns" if price.in_turns else "draft"),
        recording=recording_of(cell.text) if at_once == 1 else distinct_recording(cell.text),
        concurrency=at_once,
    )


def setup_of_price(threads: int, times_ms: Times, wrong: tuple[float, float]) -> Setup:
    of_first, of_further = wrong
    told_ms = [of_first * times_ms[0] + of_further * (ms - times_ms[0]) for ms in times_ms]
    return Setup(threads=threads, cost=_table(told_ms), taken=_table(times_ms))


def _table(times_ms: Sequence[float]) -> PassTable:
    points = tuple((size, 1e-3 * ms) for size, ms in zip(SIZES, times_ms, strict=True))
    return PassTable(points=points, per_context_row_s=1.2e-7 * points[0][1] / 1e-3)


@cache
def texts_of(text: str, *, is_alone: bool) -> ReplayedTexts:
    """Return the replayed texts of a kind, for one request after the other or for several at once."""
    scenario = make_scenario(Cell(text, "int8 90M", "long" if is_alone else "4"), Overheads())
    return replayed_texts(scenario, plan_method(scenario, "card", {}))


def run_row(cell: Cell, overheads: Overheads, method: str, settings: Mapping[str, Any]) -> Speed:
    """Decode a cell's texts in virtual time. Raises: PlanError for a text that comes out otherwise."""
    scenario, size = make_scenario(cell, overheads), SIZES_OF_RUNS[cell.size]
    texts = texts_of(cell.text, is_alone=size.at_once == 1)
    row_s = 0.0 if size.at_once == 1 else price_of(cell).row_s  # alone, all rows of a cell read the same
    runs = [_Run(scenario, texts, method, settings, first_text=idx, row_s=row_s) for idx in range(size.engines)]
    for run in runs:
        run.decode(size.tokens)
    num_tokens, seconds = sum(run.num_tokens for run in runs), sum(run.seconds for run in runs)
    later_tokens, later_s = sum(run.later_tokens for run in runs), sum(run.later_s for run in runs)
    num_rounds = sum(sum(run.rounds.values()) for run in runs)
    counts = {name: sum(run.rounds.get(name, 0) for run in runs) for name in ("beside", "turns", "off")}
    shares = {name: round(count / num_rounds, 3) for name, count in counts.items() if count}
    return Speed(round(num_tokens / seconds, 2), round(later_tokens / later_s, 2), shares)


class _Run:
    """One engine that decodes texts in a closed loop.

    Requests end at other places under each method, so that one has begun a text more than another when its tokens are
    there. Each is charged as many rows of prompts as go with its tokens: with 1 % of the time for each prompt that
    decided more than methods did.
    """

    def __init__(
        self,
        scenario: Scenario,
        texts: ReplayedTexts,
        method: str,
        settings: Mapping[str, Any],
        *,
        first_text: int,
        row_s: float,
    ) -> None:
        self._scenario, self._texts = scenario, texts
        self._stage = build_stage(scenario, plan_method(scenario, method, settings), texts)
        self._open: dict[int, tuple[int, list[int]]] = {}
        self._next_id, self._first_text, self._row_s = 0, first_text, row_s
        self._num_prompt_tokens = 0
        self.num_tokens = self.later_tokens = 0
        self.seconds = self.later_s = 0.0
        self.rounds: dict[str, int] = {}

    def decode(self, num_tokens: int) -> None:
        """Decode until so many tokens are there. Raises: PlanError for a wrong text."""
        learnt_at, learnt_tokens = 0.0, 0
        while self.num_tokens < num_tokens:
            self._add()
            self._step()
            if not learnt_tokens and self.num_tokens >= LEARNING_TOKENS * self._scenario.concurrency:
                learnt_at, learnt_tokens = self._charged_s(), self.num_tokens
        self._stage.close()
        self.seconds = self._charged_s()
        self.later_tokens, self.later_s = self.num_tokens - learnt_tokens, self.seconds - learnt_at

    def _charged_s(self) -> float:
        """Return the seconds so far, had as much been read of prompts as goes with the tokens so far."""
        usual = self.num_tokens * sum(map(len, self._texts.prompts)) / sum(map(len, self._texts.answers))
        return self._stage.clock() + self._row_s * (usual - self._num_prompt_tokens)

    def _add(self) -> None:
        while len(self._open) < self._scenario.concurrency:
            text_idx = (self._first_text + self._next_id) % len(self._texts.prompts)
            self._stage.engine.forget_prefixes()  # of ended requests
            request = make_request(self._stage, self._scenario, self._texts, text_idx, self._next_id)
            self._stage.engine.add(self._stage.engine.check(request))
            self._open[self._next_id] = text_idx, []
            self._num_prompt_tokens += len(request.prompt_ids)
            self._next_id += 1

    def _step(self) -> None:
        for update in self._stage.engine.step():
            if update.error is not None:
                raise update.error
            text_idx, answer = self._open[update.request_id]
            answer += update.token_ids
            self.num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                del self._open[update.request_id]
                if tuple(answer) != self._texts.answers[text_idx]:
                    raise PlanError(f"text {text_idx} came out otherwise than it was recorded: a bug in card")
        schedule = self._stage.policy.schedule
        self.rounds[schedule] = self.rounds.get(schedule, 0) + 1
