"""Print all tables of the committed lines; this folder's README shows some of their rows.

    python benchmarks/paper/tables.py

Of lines that say the same thing the last one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from pages import markdown
from published import SWEEP, WIDTHS, SweepPoint

RESULTS = Path(__file__).parents[1] / "results"
_SAME = (
    *("kind", "basis", "pair", "workload", "beam_width", "layers_per_round", "bookkeeping", "ablation", "draft"),
    *("ratio", "devices", "row", "temperature"),
)
PUBLISHED_SPEED_UP = 4.83  # the abstract's
_TITLES = {"gsm8k": "GSM8K", "mt-bench": "MT-bench"}

Line = Mapping[str, Any]


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of the scripts here, each the last one of its kind, in the order of the first."""
    found: dict[tuple[Any, ...], Line] = {}
    for path in sorted(folder.glob("paper_*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            found[(*(line.get(name) for name in _SAME), line.get("agreement"))] = line
    return list(found.values())


def all_tables(folder: Path) -> str:
    """Return all tables as Markdown."""
    lines = read_lines(folder)
    parts = [width_table(lines, workload) for workload in SWEEP]
    parts += [own_pair_table(lines), ablation_table(lines), agreement_table(lines), draft_table(lines)]
    parts += [map_table(lines, devices) for devices in ("own", "shared")]
    parts.append(real_loop_table(lines))
    return "\n\n".join(part for part in parts if part)


def width_table(lines: Iterable[Line], workload: str) -> str:
    """Return tokens per target pass, hits and speed over K, published, measured and simulated."""
    chosen = [line for line in lines if line["kind"] == "width" and line["workload"] == workload]
    chosen = [line for line in chosen if not line.get("latencies_measured")]
    if not chosen:
        return ""
    measured = _by_width(line for line in chosen if line["basis"] == "measured")
    flat = _by_width(line for line in chosen if line.get("bookkeeping") is False)
    busy = _by_width(line for line in chosen if line.get("bookkeeping") is True)
    rows = []
    for point in SWEEP[workload]:
        width = point.beam_width
        row = [str(width), *_published(point)]
        for found in (measured, flat):
            row += _cells(found.get(width), ("tokens_per_pass", 2), ("hit_rate", 3), ("zero_rate", 3))
        row += _cells(flat.get(width), ("speed_up", 2)) + _cells(busy.get(width), ("speed_up", 2))
        rows.append(row)
    _embolden(rows, column=-1)
    head = ["K"]
    head += [f"{who}: {what}" for who in ("published", "measured", "simulated") for what in ("tokens", "hits", "zero")]
    head += ["simulated: speed-up", "with our bookkeeping"]
    return f"{_TITLES[workload]}:\n\n{markdown(head, rows)}"


def own_pair_table(lines: Iterable[Line]) -> str:
    """Return the speed of the loop over K on a pair that was profiled."""
    chosen = [line for line in lines if line["kind"] == "width" and line.get("latencies_measured")]
    if not chosen:
        return ""
    flat = _by_width(line for line in chosen if not line["bookkeeping"])
    busy = _by_width(line for line in chosen if line["bookkeeping"])
    rows = []
    for width in (width for width in WIDTHS if width in busy):
        row = [str(width), *_cells(busy.get(width), ("drafter_pass_ms", 1), ("tokens_per_pass", 2), ("hit_rate", 3))]
        rows.append([*row, *_cells(flat.get(width), ("speed_up", 2)), *_cells(busy.get(width), ("speed_up", 2))])
    _embolden(rows, column=-1)
    head = ["K", "drafter pass, ms", "tokens", "hits", "simulated: speed-up", "with our bookkeeping"]
    return (
        f"{chosen[0]['pair']}, {_TITLES.get(chosen[0]['workload'], chosen[0]['workload'])}:\n\n{markdown(head, rows)}"
    )


def ablation_table(lines: Iterable[Line]) -> str:
    """Return what is left without each part."""
    chosen = [line for line in lines if line["kind"] == "ablation"]
    columns = list(dict.fromkeys((line["basis"], line["workload"]) for line in chosen))
    names = list(dict.fromkeys(line["ablation"] for line in chosen))
    if not chosen:
        return ""
    head, rows = ["what is left"], [[name] for name in names]
    for basis, workload in columns:
        of = {line["ablation"]: line for line in chosen if (line["basis"], line["workload"]) == (basis, workload)}
        wanted = [("tokens_per_pass", 2), ("hit_rate", 3)] + ([("speed_up", 2)] if basis == "simulated" else [])
        words = {"tokens_per_pass": "tokens", "hit_rate": "hits", "speed_up": "speed-up"}
        head += [f"{basis}, {_TITLES.get(workload, workload)}: {words[name]}" for name, _ in wanted]
        rows = [[*row, *_cells(_without_idle_hits(of.get(row[0])), *wanted)] for row in rows]
    return f"Parts of the method, K = {chosen[0]['beam_width']}:\n\n{markdown(head, rows)}"


def agreement_table(lines: Iterable[Line]) -> str:
    """Return the simulated speed of published draft models over their agreement."""
    chosen = [line for line in lines if line["kind"] == "draft-size" and line["basis"] == "simulated"]
    drafts = list(dict.fromkeys(line["draft"] for line in chosen))
    if not chosen:
        return ""
    head = ["agreement"]
    for draft in drafts:
        line = next(line for line in chosen if line["draft"] == draft)
        head += [f"{draft} (K = {line['beam_width']}, r = {line['layers_per_round']}): tokens", "speed-up"]
    rows = []
    for agreement in sorted({line["agreement"] for line in chosen}):
        of = {line["draft"]: line for line in chosen if line["agreement"] == agreement}
        cells = [_cells(of.get(draft), ("tokens_per_pass", 2), ("speed_up", 2)) for draft in drafts]
        rows.append([f"{agreement:g}", *(cell for pair in cells for cell in pair)])
    return f"Draft models of Llama-3.1-70B, simulated:\n\n{markdown(head, rows)}"


def map_table(lines: Iterable[Line], devices: str) -> str:
    """Return the planned speed over agreement and drafter passes in a target pass; bold: as published, or faster."""
    chosen = [line for line in lines if line["kind"] == "speed-map" and line["devices"] == devices]
    of = {(line["agreement"], line["ratio"]): line["speed_up"] for line in chosen}
    ratios = sorted({ratio for _, ratio in of})
    if not chosen:
        return ""
    rows = [
        [f"{agreement:g}", *(_speed_cell(of.get((agreement, ratio))) for ratio in ratios)]
        for agreement in sorted({agreement for agreement, _ in of})
    ]
    where = "a device of its own" if devices == "own" else "the target's device, in turns"
    title = f"`card` as it is by default, drafter on {where}; over drafter passes in a target pass"
    return f"{title}:\n\n{markdown(['agreement', *(f'{ratio:g}' for ratio in ratios)], rows)}"


def real_loop_table(lines: Iterable[Line]) -> str:
    """Return the speed of the loop over K on a real pair, by set and temperature, beside the best turns."""
    chosen = [line for line in lines if line["kind"] == "real-loop"]
    if not chosen:
        return ""

    def column(line: Line) -> tuple[bool, str]:
        return line["row"] != "loop", f"K = {line['beam_width']}" if line["row"] == "loop" else line["row"]

    columns = list(dict.fromkeys(column(line) for line in sorted(chosen, key=lambda one: column(one)[0])))
    rows = []
    for workload, temperature in dict.fromkeys((line["workload"], line["temperature"]) for line in chosen):
        of = [line for line in chosen if (line["workload"], line["temperature"]) == (workload, temperature)]
        best = {key: max((x for x in of if column(x) == key), key=lambda x: float(x["speed_up"])) for key in columns}
        cells = [f"{line['speed_up']:.2f} ({line['layers_per_round']})" for line in best.values()]
        rows.append([f"{_TITLES.get(workload, workload)}, T = {temperature:g}", *cells])
    title = f"{chosen[0]['pair']}, times plain decoding on one core; in brackets the layers or tokens that were best"
    return f"{title}:\n\n{markdown(['set', *(name for _, name in columns)], rows)}"


def _speed_cell(speed_up: float | None) -> str:
    if speed_up is None:
        return "–"
    return f"**{speed_up:.2f}**" if speed_up >= PUBLISHED_SPEED_UP else f"{speed_up:.2f}"


def draft_table(lines: Iterable[Line]) -> str:
    """Return what the agreement of each of our draft models is worth, with as many layers for all."""
    chosen = [line for line in lines if line["kind"] == "draft-size" and line["basis"] == "measured"]
    workloads = list(dict.fromkeys(line["workload"] for line in chosen))
    by_draft = {(line["draft"], line["workload"]): line for line in chosen}
    sizes = {line["draft"]: line["draft_parameters"] for line in chosen}
    if not chosen:
        return ""
    head = ["draft", "parameters"]
    head += [f"{_TITLES.get(name, name)}: {what}" for name in workloads for what in ("tokens", "hits")]
    rows = [
        [
            f"{draft} (the target itself: an upper bound)" if draft == "demo-target" else draft,
            f"{size / 1e6:.1f} M",
            *(
                cell
                for name in workloads
                for cell in _cells(by_draft.get((draft, name)), ("tokens_per_pass", 2), ("hit_rate", 3))
            ),
        ]
        for draft, size in sorted(sizes.items(), key=lambda item: item[1])
    ]
    return f"Our draft models, counted, K = {chosen[0]['beam_width']}:\n\n{markdown(head, rows)}"


def _without_idle_hits(line: Line | None) -> Line | None:
    """Leave out the hits of a tree that no correction ever re-roots: they lead nowhere."""
    if line is None or not line["variant"].startswith("no-re-rooting"):
        return line
    return {name: value for name, value in line.items() if name != "hit_rate"}


def _by_width(lines: Iterable[Line]) -> dict[int, Line]:
    return {line["beam_width"]: line for line in lines}


def _published(point: SweepPoint) -> list[str]:
    zero = "–" if point.zero_rate is None else f"{point.zero_rate:.3f}"
    return [f"{point.tokens_per_pass:.2f}", f"{1 - point.miss_rate:.3f}", zero]


def _cells(line: Line | None, *wanted: tuple[str, int]) -> list[str]:
    return ["–" if line is None or name not in line else f"{line[name]:.{digits}f}" for name, digits in wanted]


def _embolden(rows: list[list[str]], *, column: int) -> None:
    numbers = {i: float(row[column]) for i, row in enumerate(rows) if row[column] != "–"}
    if numbers:
        row = rows[max(numbers, key=lambda i: numbers[i])]
        row[column] = f"**{row[column]}**"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines (default: %(default)s)")
    print(all_tables(parser.parse_args(argv).results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
