"""Does the tuned policy earn its place? A matrix of cells on the planner's virtual clock, with a verdict.

Each cell is a kind of text, prices of the two models, requests at once, a draft model and a set of writers. The real
engine decodes the same made-up texts there under the tuned policy and under a few fixed settings. The clock is virtual
and all texts are seeded, so a busy machine changes no figure.

    python benchmarks/policy_gate.py --name NAME
    python benchmarks/policy_gate.py --name NAME --against OTHER  # the geometric mean must be no worse than OTHER's

It passes if the geometric mean of the speed-ups is no worse than that of the other policy, no cell is more than 5 %
behind its best fixed setting after 64 rounds, and none is more than 3 % slower than plain decoding, learning included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from options import append_lines, describe_run
from rich.console import Console
from rich.table import Table

from card.errors import PlanError
from card.planner.profile import Overheads, PassTable, Profile, Setup
from card.planner.recording import RecordedText, Recording
from card.planner.replayed_texts import ReplayedTexts
from card.planner.scene import Scene, build_stage, make_request, plan_method, replayed_texts
from card.planner.synthetic import make_text

RESULTS = Path(__file__).parent / "results" / "policy_gate.jsonl"
LEARNING_ROUNDS = 64
MOST_BEHIND_FIXED, MOST_BEHIND_PLAIN = 0.05, 0.03  # shares of the speed

NUM_TEXTS, TEXT_TOKENS, PROMPT_TOKENS, VOCAB_SIZE = 24, 128, 64, 2048
NUM_CANDIDATES, NUM_TARGET_IDS = 16, 8
TOKENS = {1: 1_500, 4: 3_000, 16: 6_000}  # decoded in one run, by the requests at once
COPIED_TOKENS, FRESH_TOKENS = 24, 8  # of a copying text: runs of its prompt, and what stands between them

# Milliseconds of passes of 1, 8, 16 and 64 tokens: of a target on all cores, of one beside a drafter, and of a drafter
# on either, as a small model gains nothing by a second thread. Rounded from benchmarks/LOG.md (int8 and bfloat16 of the
# demo target inflated to 90 and 300 M, Qwen2.5-Coder 1.5 B with 0.5 B in int8), where one thread takes 1.7 times as
# long as two. "two devices" are like card.planner's profiles of a 70 B model: a drafter takes nothing from the target.
PRICES: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "int8 90M": {"alone": (1.7, 2.3, 3.0, 9.5), "beside": (2.9, 4.1, 5.6, 18.0), "draft": (0.14, 0.2, 0.27, 0.8)},
    "bf16 300M": {"alone": (11, 15.6, 21.5, 66), "beside": (18, 27, 39, 124), "draft": (0.7, 1.0, 1.25, 3.2)},
    "two devices": {"alone": (20, 20.5, 21, 26), "beside": (20, 20.5, 21, 26), "draft": (2.2, 2.2, 2.3, 2.6)},
    "dear draft": {"alone": (33, 50, 68, 190), "beside": (57, 92, 128, 370), "draft": (14, 21, 29, 85)},
}
# The int8 target with AVX2 alone, where rows are dear; rounded from benchmarks/results/avx2_90M.jsonl.
AVX2 = "avx2 90M"
AVX2_PRICE = {"alone": (2.35, 4.4, 8.3, 33), "beside": (3.9, 7.5, 14, 56), "draft": (0.3, 0.4, 0.55, 1.7)}
SIZES = (1, 8, 16, 64)
# What a busy machine makes of the measurements at the start: for each of the three costs, by what the pass of one token
# and what each further token is measured to cost is wrong. Passes themselves take what they take.
STARTS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "right": {},
    "slow": {"alone": (2, 2), "beside": (2, 2), "draft": (2, 2)},
    "dear rows": {"alone": (1, 2), "beside": (1, 2)},
    "dear drafting": {"alone": (1, 2), "beside": (2, 2), "draft": (2, 2)},
    "cheap draft": {"draft": (0.5, 0.5)},
    "crowded": {"alone": (1.6, 1.6)},  # somebody took the other core while passes on both were measured
}

# Seconds around the passes. Of each request in a round: 0.18 ms, measured with 16 at once at 90 M in int8. Where a
# drafter's candidates are verified, a further 0.2 ms (measured of one request, tree beside plain: querying, extending
# and correcting its tree, and more tokens to choose and to turn into text). A policy that tunes itself: 12 us in a
# tight loop, thrice that between passes; the policy "before" took 21 and was charged 60. Of a drafter's pass in turns:
# 0.15 ms around it, and 0.3 more for the first one behind a pass of the target's, whose weights have taken the caches
# (0.9 ms and 0.45 for each further one were measured with the demo draft, of which a pass alone takes 0.2). Policies up
# to "lasting" were charged 0.1 and none. Two models at once slow each other by 15 %, of which no policy is told.
OVERHEADS = Overheads(
    request_s=1.8e-4,
    drafted_request_s=2e-4,
    tuned_s=3.6e-5,
    step_s=1.5e-4,
    cold_s=3e-4,
    beside_factor=1.15,
    by_writer={"suffix": 8.5e-5},
    source="gate",
)


@dataclass(frozen=True, slots=True)
class Draft:
    """How a made-up draft model behaves."""

    agreement: float  # share of places where its first choice is right
    claims: float  # mean probability that it gives its first choice
    num_wrong: int = 0  # places at the beginning of the first text where its first choice is wrong


DRAFTS = {"good": Draft(0.88, 0.88), "poor": Draft(0.45, 0.45), "adversarial": Draft(0.03, 0.9)}
LATE = "late"  # as good as a good one after a beginning that speaks against it
Priced = tuple[Sequence[float], tuple[float, float]]  # milliseconds by size, and what they are measured to be
KINDS = ("prose", "mixed")  # tokens hardly repeat; every second text copies its prompt
WRITERS: Mapping[str, tuple[str, ...]] = {"draft": ("beam",), "draft+suffix": ("beam", "suffix")}


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the matrix."""

    kind: str
    price: str
    at_once: int
    draft: str
    writers: str
    start: str = "right"


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one run."""

    whole: float
    later: float  # after the first rounds, in which a policy learns
    schedules: Mapping[str, float]  # shares of the rounds


def cells() -> list[Cell]:
    """Return a quarter of all combinations, in which every pair of values of two properties occurs."""
    axes: tuple[Sequence[Any], ...] = (KINDS, tuple(PRICES), tuple(TOKENS), tuple(DRAFTS), tuple(WRITERS))
    places = product(*(range(len(axis)) for axis in axes))
    right = [Cell(*(axis[i] for axis, i in zip(axes, place, strict=True))) for place in places if sum(place) % 4 == 2]
    dear_rows = product((*DRAFTS, LATE), STARTS)
    return [*right, *(Cell("prose", AVX2, 1, draft, "draft", start) for draft, start in dear_rows)]


def fixed_settings(cell: Cell) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the methods and settings that the policy is compared with; plain decoding is "plain"."""
    writers = {"writers": WRITERS[cell.writers], "policy": "fixed"}
    settings: dict[str, tuple[str, dict[str, Any]]] = {"plain": ("vanilla", {})}
    if cell.writers != "draft":
        settings["suffix"] = ("suffix", {"policy": "fixed"})
    for length in (2, 6):
        settings[f"turns-{length}"] = ("card", {**writers, "schedule": "turns", "num_speculative_tokens": length})
    settings["beside"] = ("card", {**writers, "schedule": "beside", "verify": "tree"})
    return settings


def make_recording(kind: str, draft: Draft, seed: int = 0) -> Recording:
    """Return texts and what the draft model says of them."""
    rng = np.random.default_rng(seed)
    texts = tuple(
        _text(rng, draft, copies=kind == "mixed" and idx % 2 == 1, num_wrong=0 if idx else draft.num_wrong)
        for idx in range(NUM_TEXTS)
    )
    return Recording(
        target="made up",
        draft="made up",
        source=f"{kind}, {draft}, seed {seed}",
        vocab_size=VOCAB_SIZE,
        seed=seed,
        max_tokens=TEXT_TOKENS,
        num_candidates=NUM_CANDIDATES,
        num_target_ids=NUM_TARGET_IDS,
        texts=texts,
    )


def _text(rng: np.random.Generator, draft: Draft, *, copies: bool, num_wrong: int) -> RecordedText:
    prompt = rng.choice(VOCAB_SIZE, PROMPT_TOKENS, replace=False)
    answer = rng.choice(VOCAB_SIZE, TEXT_TOKENS, replace=False)
    if copies:
        for start in range(0, TEXT_TOKENS - COPIED_TOKENS + 1, COPIED_TOKENS + FRESH_TOKENS):
            source = int(rng.integers(PROMPT_TOKENS - COPIED_TOKENS))
            answer[start : start + COPIED_TOKENS] = prompt[source : source + COPIED_TOKENS]
    weights = 0.55 * 0.45 ** np.arange(NUM_CANDIDATES - 1)  # of what the first choice leaves
    ids = np.empty((TEXT_TOKENS, NUM_CANDIDATES + NUM_TARGET_IDS), np.int64)
    ranks, claims = [], []
    for place, token in enumerate(answer):
        others = rng.choice(VOCAB_SIZE - 1, NUM_CANDIDATES + NUM_TARGET_IDS, replace=False)
        others += others >= token  # all but the text's own token
        claimed = 0.08 + 0.92 * rng.beta(1.5 * (draft.claims - 0.08) / 0.92, 1.5 * (1 - draft.claims) / 0.92)
        claims.append(min(claimed, 1 - 1e-6))
        is_honest = draft.claims == draft.agreement
        is_first = rng.random() < (claims[-1] if is_honest else draft.agreement) and place >= num_wrong
        last = NUM_CANDIDATES - 1
        later = 1 + int(rng.choice(last, p=weights / weights.sum())) if is_honest else last
        ranks.append(0 if is_first else later)
        ids[place] = np.insert(others[:-1], ranks[-1], token)
    return make_text(prompt.tolist(), ids, ranks, np.array(claims), weights)


def make_scene(cell: Cell, recording: Recording) -> Scene:
    """Return the hardware of a cell, with what is measured at its start."""
    price, start = {**PRICES, AVX2: AVX2_PRICE}[cell.price], STARTS[cell.start]
    alone, beside, draft = ((price[name], start.get(name, (1, 1))) for name in ("alone", "beside", "draft"))
    return Scene(
        target=_profile(alone, beside), draft=_profile(draft, draft), recording=recording, concurrency=cell.at_once
    )


def _profile(alone: Priced, beside: Priced) -> Profile:
    def setup(threads: int, priced: Priced) -> Setup:
        times_ms, (of_first, of_further) = priced
        told_ms = [of_first * times_ms[0] + of_further * (ms - times_ms[0]) for ms in times_ms]
        return Setup(threads=threads, cost=_table(told_ms), taken=_table(times_ms))

    setups = (setup(1, beside), setup(2, alone))
    return Profile(name="gate", measured=False, source="benchmarks/LOG.md", setups=setups, overheads=OVERHEADS)


def _table(times_ms: Sequence[float]) -> PassTable:
    points = tuple((size, 1e-3 * ms) for size, ms in zip(SIZES, times_ms, strict=True))
    return PassTable(points=points, per_context_row_s=2e-7 * points[0][1] / 1.7e-3)


def decode(scene: Scene, texts: ReplayedTexts, method: str, settings: Mapping[str, Any], num_tokens: int) -> Speed:
    """Decode the texts in a closed loop until so many tokens are there. Raises: PlanError for a wrong text."""
    stage = build_stage(scene, plan_method(scene, method, settings), texts)
    engine, clock = stage.engine, stage.clock
    open_texts: dict[int, tuple[int, list[int]]] = {}
    next_id = num_committed = num_rounds = 0
    learnt_at, learnt_tokens, rounds = 0.0, 0, dict.fromkeys(("beside", "turns", "off"), 0)
    while num_committed < num_tokens:
        while len(open_texts) < scene.concurrency:
            text_idx = next_id % len(texts.prompts)
            engine.forget_prefixes()
            engine.add(engine.check(make_request(stage, scene, texts, text_idx, next_id)))
            open_texts[next_id] = text_idx, []
            next_id += 1
        for update in engine.step():
            if update.error is not None:
                raise update.error
            text_idx, answer = open_texts[update.request_id]
            answer += update.token_ids
            num_committed += len(update.token_ids)
            if update.finish_reason is not None:
                del open_texts[update.request_id]
                if tuple(answer) != texts.answers[text_idx]:
                    raise PlanError(f"text {text_idx} came out otherwise than it was recorded: a bug in card")
        num_rounds += 1
        rounds[stage.policy.schedule] += 1
        if num_rounds == LEARNING_ROUNDS:
            learnt_at, learnt_tokens = clock(), num_committed
    stage.close()
    shares = {name: round(count / num_rounds, 3) for name, count in rounds.items() if count}
    later = (num_committed - learnt_tokens) / (clock() - learnt_at)
    return Speed(round(num_committed / clock(), 2), round(later, 2), shares)


@dataclass(slots=True)
class Known:
    """What several cells have in common."""

    texts: dict[tuple[str, str], tuple[Recording, ReplayedTexts | None]] = field(default_factory=dict)
    fixed: dict[Cell, dict[str, Speed]] = field(default_factory=dict)  # by cells whose start is right


def run_cell(cell: Cell, known: Known) -> dict[str, Any]:
    """Return the speeds of a cell, and how the policy stands among them."""
    key, draft = (cell.kind, cell.draft), {**DRAFTS, LATE: Draft(0.88, 0.88, num_wrong=32)}[cell.draft]
    recording, replayed = known.texts.get(key) or (make_recording(cell.kind, draft), None)
    scene = make_scene(cell, recording)
    if replayed is None:
        replayed = replayed_texts(scene, plan_method(scene, "card", {}))
        known.texts[key] = recording, replayed
    num_tokens, right = TOKENS[cell.at_once], replace(cell, start="right")
    if right not in known.fixed:  # a fixed setting does not ask what was measured
        right_scene = make_scene(right, recording)
        known.fixed[right] = {
            name: decode(right_scene, replayed, method, settings, num_tokens)
            for name, (method, settings) in fixed_settings(cell).items()
        }
    fixed = known.fixed[right]
    tuned = decode(scene, replayed, "card", {}, num_tokens)  # as users have it, whoever else writes in fixed settings
    best = max(fixed, key=lambda name: fixed[name].later)
    return {
        "cell": asdict(cell),
        "tuned": asdict(tuned),
        "fixed": {name: speed.later for name, speed in fixed.items()},
        "plain": fixed["plain"].whole,
        "best": best,
        "over_plain": round(tuned.whole / fixed["plain"].whole, 4),
        "over_best": round(tuned.later / fixed[best].later, 4),
    }


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of numbers above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def verdict(lines: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what misses the gate; nothing if it passes. Means are over the cells that both have."""
    misses, mean, least = [], 0.0, 0.0
    if others:
        mean, least = (
            geometric_mean(line["over_plain"] for line in ones if line["cell"] in [other["cell"] for other in them])
            for ones, them in ((lines, others), (others, lines))
        )
    if round(mean, 3) < round(least, 3):
        misses.append(f"the geometric mean is {mean:.3f} times plain decoding, that of the other policy {least:.3f}")
    for name, most, limit in (("best", MOST_BEHIND_FIXED, "over_best"), ("plain", MOST_BEHIND_PLAIN, "over_plain")):
        behind = [line for line in lines if line[limit] < 1 - most]
        if behind:
            worst = min(line[limit] for line in behind)
            misses.append(f"{len(behind)} cells are more than {most:.0%} behind {name}, the worst at {worst:.3f}")
    return misses


def _print(console: Console, lines: Sequence[Mapping[str, Any]]) -> None:
    table = Table(
        "kind", "price", "at once", "draft", "writers", "start", "plain", "best fixed", "card", "/ plain", "/ best", ""
    )
    for line in lines:
        cell, tuned = line["cell"], line["tuned"]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in tuned["schedules"].items())
        best = f"{line['fixed'][line['best']]:.0f} ({line['best']})"
        figures = (f"{line['plain']:.0f}", best, f"{tuned['later']:.0f}")
        ratios = (f"{line['over_plain']:.2f}", f"{line['over_best']:.3f}")
        table.add_row(*(str(value) for value in cell.values()), *figures, *ratios, shares)
    console.print(table)


def read(name: str, path: Path) -> list[dict[str, Any]]:
    """Return the latest lines of a policy, one for each cell."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    of_cells = [{**line, "cell": asdict(Cell(**line["cell"]))} for line in lines if line["policy"] == name]
    return list({json.dumps(line["cell"]): line for line in of_cells}.values())


@click.command()
@click.option("--name", required=True, help="Name of the policy in the results.")
@click.option("--against", help="Name of an earlier policy in the results: the mean must be no worse.")
@click.option("--out", type=Path, default=RESULTS, show_default=True, help="JSON lines are appended to it.")
@click.option("--only", default="", help="Run cells whose properties contain this text.")
@click.option("--fixed-of", help="Take fixed settings as this policy's lines have them, where they do; run the others.")
@click.option("--show", is_flag=True, help="Print what was written before; run nothing.")
def main(name: str, against: str | None, out: Path, only: str, fixed_of: str | None, show: bool) -> None:
    """Run the matrix, print a table and say pass or fail."""
    console = Console(width=150)
    torch.set_num_threads(1)  # rows of logits are short: more threads only wait for each other
    known = Known()
    for line in read(fixed_of, out) if fixed_of else []:
        speeds = {name: Speed(line["plain"], later, {}) for name, later in line["fixed"].items()}  # `whole` is plain's
        known.fixed[replace(Cell(**line["cell"]), start="right")] = speeds
    chosen = [cell for cell in cells() if only in " ".join(map(str, asdict(cell).values()))]
    lines: list[dict[str, Any]] = read(name, out) if show else []
    for number, cell in enumerate([] if show else chosen, 1):
        console.print(f"{number}/{len(chosen)} {cell}", style="dim")
        lines.append({"benchmark": "policy_gate", "policy": name, **run_cell(cell, known)})
    _print(console, lines)
    others = read(against, out) if against else []
    mean, near = (geometric_mean(line[ratio] for line in lines) for ratio in ("over_plain", "over_best"))
    console.print(f"geometric mean: {mean:.3f} of plain decoding, {near:.3f} of the best fixed setting")
    misses = verdict(lines, others)
    console.print("\n".join(["FAIL", *misses]) if misses else "PASS")
    if not show:
        facts = describe_run()
        append_lines(out, ({**line, **facts} for line in lines))


if __name__ == "__main__":
    main()
