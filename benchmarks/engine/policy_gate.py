"""Does the tuned policy earn its place? A matrix of cells on the planner's virtual clock, with a verdict.

Each cell is a kind of text, prices of the two models and a size of run. The real engine decodes there what the demo
pair was recorded to say, or made-up draft models: under the tuned policy, and under fixed settings: plain decoding,
sequential speculation with each length, suffixes alone. Python around rounds is charged as `round_overheads.py`
measured it, to all rows alike. The clock is virtual and all texts are given, so a busy machine changes no figure.

    python benchmarks/engine/policy_gate.py --name NAME --jobs 2
    python benchmarks/engine/policy_gate.py --name NAME --fixed-of OTHER --against OTHER  # the tuned row alone
    python benchmarks/engine/policy_gate.py --name NAME --fixed-of OTHER --only "demo, int8 90M, short"

It passes if no cell is more than 2 % behind its best fixed row or plain decoding, once each engine has decoded 50
tokens of each request at once; and the geometric mean is 5 % above that of the other policy.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
import msgspec
import torch
from options import append_lines, describe_run
from policy_cells import AROUND_MODELS, Cell, Speed, cells, fixed_rows, run_row
from rich.console import Console
from rich.table import Table

from card.errors import BenchError
from card.tools.planner.profile import Overheads

FOLDER = Path(__file__).parents[1] / "results"
RESULTS, OVERHEADS = FOLDER / "policy_gate_2.jsonl", FOLDER / "round_overheads.jsonl"
LEAST = 0.98  # of the best fixed row and of plain decoding, in every cell
LEAST_OVER_OTHER = 1.05  # the geometric mean over that of another policy
Line = Mapping[str, Any]


def measured_overheads(path: Path) -> Overheads:
    """Return what `round_overheads.py` measured last. Raises: BenchError if it measured nothing."""
    if not path.is_file():
        raise BenchError(f"{path} is not there; make it with benchmarks/engine/round_overheads.py")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    told = [line["overheads"] for line in lines if "overheads" in line]
    if not told:
        raise BenchError(f"{path} holds no overheads; make it again with benchmarks/engine/round_overheads.py")
    return msgspec.structs.replace(msgspec.convert(told[-1], Overheads), **AROUND_MODELS)


def name_of(cell: Cell) -> str:
    """Return the properties of a cell in a row."""
    return ", ".join(asdict(cell).values())


def run_cell(cell: Cell, overheads: Overheads, fixed: Mapping[str, Line] | None = None) -> dict[str, Any]:
    """Return the speeds of a cell, and how the policy stands among them.

    Args:
        fixed: speeds of the fixed rows, where they are known.
    """
    torch.set_num_threads(1)  # rows of logits are short: more threads only wait for each other
    started = time.perf_counter()
    if fixed is None:  # a fixed row does not ask what was measured at the start
        right = replace(cell, start="right")
        fixed = {name: asdict(run_row(right, overheads, *row)) for name, row in fixed_rows(cell).items()}
    tuned = run_row(cell, overheads, "card", {})  # as users have it
    return {"cell": asdict(cell), **ratios(tuned, fixed), "took_s": round(time.perf_counter() - started, 1)}


def ratios(tuned: Speed, fixed: Mapping[str, Line]) -> dict[str, Any]:
    """Return the speeds, and those of the tuned row over the best fixed row and over plain decoding."""
    best = {kind: max(fixed, key=lambda name: fixed[name][kind]) for kind in ("whole", "later")}
    return {
        "tuned": asdict(tuned),
        "fixed": fixed,
        "best": best["later"],
        "whole_over_best": round(tuned.whole / fixed[best["whole"]]["whole"], 4),
        "later_over_best": round(tuned.later / fixed[best["later"]]["later"], 4),
        "later_over_plain": round(tuned.later / fixed["plain"]["later"], 4),
    }


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of numbers above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def verdict(lines: Sequence[Line], others: Sequence[Line]) -> list[str]:
    """Return what misses the gate; nothing if it passes. The mean is over the cells that both policies have."""
    misses = []
    for name, ratio in (("the best fixed row", "later_over_best"), ("plain decoding", "later_over_plain")):
        behind = [line for line in lines if line[ratio] < LEAST]
        if behind:
            worst = min(behind, key=lambda line: line[ratio])
            misses.append(
                f"{len(behind)} of {len(lines)} cells are below {LEAST} of {name}, the worst at {worst[ratio]:.3f}: "
                f"{name_of(Cell(**worst['cell']))}"
            )
    if others:
        mean = over_other(lines, others)
        if mean < LEAST_OVER_OTHER:
            misses.append(f"the geometric mean is {mean:.3f} times that of the other policy, not {LEAST_OVER_OTHER}")
    return misses


def over_other(lines: Sequence[Line], others: Sequence[Line]) -> float:
    """Return the geometric mean of speeds over another policy's, in the cells that both have."""
    known = {json.dumps(other["cell"]): other["tuned"]["later"] for other in others}
    pairs = [(line["tuned"]["later"], known.get(json.dumps(line["cell"]))) for line in lines]
    shared = [own / other for own, other in pairs if other is not None]
    if not shared:
        raise BenchError("the two policies have no cell in common; run both with the same --only")
    return geometric_mean(shared)


def read(name: str, path: Path) -> list[dict[str, Any]]:
    """Return the latest lines of a policy, one for each cell. Raises: BenchError if there are none."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    found = {json.dumps(line["cell"]): line for line in lines if line["policy"] == name}
    if not found:
        raise BenchError(f"{path} has no lines of {name}; it has those of {sorted({line['policy'] for line in lines})}")
    return list(found.values())


def known_fixed(lines: Iterable[Line], overheads: Overheads) -> dict[Cell, Mapping[str, Line]]:
    """Return the fixed rows of cells by lines of another run, unless something else was charged to them."""
    return {
        replace(Cell(**line["cell"]), start="right"): line["fixed"]
        for line in lines
        if _shared(line["overheads"]) == _shared(msgspec.to_builtins(overheads))
    }


def _shared(overheads: Line) -> dict[str, Any]:
    """Return what fixed rows are charged, too."""
    return {k: v for k, v in overheads.items() if not k.startswith("tuned") and k != "source"}


def run_cells(
    chosen: Sequence[Cell], overheads: Overheads, fixed: Mapping[Cell, Mapping[str, Line]], jobs: int
) -> Iterator[dict[str, Any]]:
    """Yield the results of cells as they come; fixed rows are run once for all starts of a cell."""
    groups: dict[Cell, list[Cell]] = {}
    for cell in chosen:
        groups.setdefault(replace(cell, start="right"), []).append(cell)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(_run_group, group, overheads, fixed.get(right)) for right, group in groups.items()]
        for run in as_completed(runs):
            yield from run.result()


def _run_group(group: Sequence[Cell], overheads: Overheads, fixed: Mapping[str, Line] | None) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for cell in group:
        lines.append(run_cell(cell, overheads, lines[0]["fixed"] if lines else fixed))
    return lines


def _print(console: Console, lines: Sequence[Line]) -> None:
    table = Table("cell", "plain", "best fixed", "card", "/ plain", "/ best", "/ best, whole", "schedules")
    for line in sorted(lines, key=lambda line: min(line["later_over_best"], line["later_over_plain"])):
        tuned, fixed, best = line["tuned"], line["fixed"], line["best"]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in tuned["schedules"].items())
        figures = (f"{fixed['plain']['later']:.0f}", f"{fixed[best]['later']:.0f} ({best})", f"{tuned['later']:.0f}")
        over = (f"{line[name]:.3f}" for name in ("later_over_plain", "later_over_best", "whole_over_best"))
        table.add_row(name_of(Cell(**line["cell"])), *figures, *over, shares)
    console.print(table)
    means = {name: geometric_mean(line[name] for line in lines) for name in lines[0] if "_over_" in name}
    console.print("geometric means: " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))


@click.command()
@click.option("--name", required=True, help="Name of the policy in the results.")
@click.option("--against", help="Name of an earlier policy in the results: the mean must be 5 % above its.")
@click.option("--out", type=Path, default=RESULTS, show_default=True, help="JSON lines are appended to it.")
@click.option("--overheads", "charged", type=Path, default=OVERHEADS, show_default=True, help="What is charged.")
@click.option("--only", default="", help="Run cells whose row of properties contains this text.")
@click.option("--fixed-of", help="Take fixed rows as this policy's lines have them, where they do; run the others.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--show", is_flag=True, help="Print what was written before; run nothing.")
def main(
    name: str, against: str | None, out: Path, charged: Path, only: str, fixed_of: str | None, jobs: int, show: bool
) -> None:
    """Run the matrix, print a table and say pass or fail."""
    console = Console(width=150)
    lines: list[dict[str, Any]] = read(name, out) if show else []
    if not show:
        overheads, facts = measured_overheads(charged), describe_run()
        fixed = known_fixed(read(fixed_of, out), overheads) if fixed_of else {}
        chosen = [cell for cell in cells() if only in name_of(cell)]
        about = {"overheads": msgspec.to_builtins(overheads), **facts}
        for number, found in enumerate(run_cells(chosen, overheads, fixed, jobs), 1):
            lines.append({"benchmark": "policy_gate", "policy": name, **found, **about})
            append_lines(out, lines[-1:])
            best = f"{found['later_over_best']:.3f} of {found['best']}"
            console.print(f"{number}/{len(chosen)} {name_of(Cell(**found['cell']))}: {best}, {found['took_s']} s")
    lines = [line for line in lines if only in name_of(Cell(**line["cell"]))]
    others = read(against, out) if against else []
    _print(console, lines)
    if others:
        console.print(f"over {against}: {over_other(lines, others):.3f}")
    misses = verdict(lines, others)
    console.print("\n".join(["FAIL", *misses]) if misses else "PASS")


if __name__ == "__main__":
    main()
