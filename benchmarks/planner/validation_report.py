"""Figures and tables of `planner_validation.py`: what was measured, what was planned, and by how much they differ.

python benchmarks/planner/validation_report.py benchmarks/results/planner_validation.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options
from pages import markdown

from card.engine.metrics import RequestStats
from card.errors import BenchError
from card.tools.bench.row_names import BASELINE
from card.tools.bench.tables import shown

Lines = Sequence[dict[str, Any]]

_PARTS = {  # by column, those of a round
    "tokens a pass": ("tokens_per_pass", ".2f"),
    "target's pass, ms": ("pass_ms", ".2f"),
    "waiting, ms": ("waited_ms", ".2f"),
    "overhead, ms": ("overhead_ms", ".2f"),
    "drafter passes": ("drafter_passes_per_pass", ".1f"),
    "each, ms": ("drafter_pass_ms", ".2f"),
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens/s of a row in each repeat."""

    measured: Sequence[float]
    planned: Sequence[float]


def compared(own: Rates, plain: Rates) -> dict[str, Any]:
    """Return speeds, their ratios to plain decoding's in the same repeat, and by how much the planned ones are off."""
    speeds = [statistics.median(runs) for runs in (own.measured, own.planned)]
    ratios = [
        statistics.median(a / b for a, b in zip(runs, others, strict=True))
        for runs, others in ((own.measured, plain.measured), (own.planned, plain.planned))
    ]
    return {
        "measured_tokens_per_s": round(speeds[0], 2),
        "measured_runs": [round(rate, 2) for rate in own.measured],
        "planned_tokens_per_s": round(speeds[1], 2),
        "measured_ratio": round(ratios[0], 4),
        "planned_ratio": round(ratios[1], 4),
        "error": round(speeds[1] / speeds[0] - 1, 4),
        "ratio_error": round(ratios[1] / ratios[0] - 1, 4),
    }


def parts_of(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Return what a speed is made of: milliseconds of each round, and what came of it."""
    passes = max(sum(one.target_passes for one in stats), 1)
    busy_s, waited_s = sum(one.target_busy_s for one in stats), sum(one.waited_s for one in stats)
    beyond_s = sum(one.decode_s for one in stats) - busy_s - waited_s
    steps = sum(one.drafter_passes for one in stats)
    schedules = Counter(one.schedule for one in stats)
    return {
        "pass_ms": round(1e3 * busy_s / passes, 3),
        "waited_ms": round(1e3 * waited_s / passes, 3),
        "overhead_ms": round(1e3 * beyond_s / passes, 3),
        "tokens_per_pass": round(sum(one.num_new_tokens - 1 for one in stats) / passes, 3),
        "verified_per_pass": round(sum(one.verified_tokens for one in stats) / passes, 2),
        "drafter_passes_per_pass": round(steps / passes, 2),
        "drafter_pass_ms": round(1e3 * sum(one.drafter_busy_s for one in stats) / steps, 3) if steps else None,
        "schedules": dict(schedules),
    }


def rows_of(lines: Lines) -> list[dict[str, Any]]:
    """Return the lines of rows, the last one of each price and row."""
    return list({(line["price"], line["row"]): line for line in lines if line["kind"] == "row"}.values())


def median_errors(rows: Lines) -> dict[str, float]:
    """Return the median absolute error of speeds and that of ratios; the baseline's own ratio is right anyway."""
    ratios = [abs(row["ratio_error"]) for row in rows if row["row"] != BASELINE]
    return {
        "tokens/s": statistics.median(abs(row["error"]) for row in rows),
        "against plain decoding": statistics.median(ratios) if ratios else 0.0,
    }


def error_cells(line: dict[str, Any]) -> dict[str, str]:
    """Return a row's speeds and errors as columns of a table."""
    is_plain = line["row"] == BASELINE
    return {
        "method": line["row"],
        "tokens/s": f"{line['measured_tokens_per_s']:.1f}",
        "planned": f"{line['planned_tokens_per_s']:.1f}",
        "error": f"{line['error']:+.0%}",
        "vs plain": f"{line['measured_ratio']:.2f}",
        "planned vs plain": f"{line['planned_ratio']:.2f}",
        "error of that": "–" if is_plain else f"{line['ratio_error']:+.0%}",
        "same text": f"{line['num_texts_equal']} of {line['num_texts']}",
    }


def part_cells(line: dict[str, Any]) -> dict[str, str]:
    """Return what a row's rounds were made of, measured and planned, as columns of a table."""
    measured, planned = line["measured_parts"], line["planned_parts"]
    cells = {"measured / planned": line["row"]}
    for column, (name, how) in _PARTS.items():
        both = [shown(parts[name], how) for parts in (measured, planned)]
        cells[column] = "–" if both == ["–", "–"] else " / ".join(both)
    lengths = [line["length"], line["planned_length"]]
    cells["draft length"] = "–" if lengths[0] is None else " / ".join(str(length) for length in lengths)
    return cells


def summary_cells(rows: Lines) -> list[dict[str, str]]:
    """Return a line of a table for each price, and one for all of them."""
    prices = list(dict.fromkeys(row["price"] for row in rows))
    groups = {price: [row for row in rows if row["price"] == price] for price in prices}
    if len(groups) > 1:
        groups["all"] = list(rows)
    return [
        {"price of the target": price, "rows": str(len(same))}
        | {f"median error, {what}": f"{error:.1%}" for what, error in median_errors(same).items()}
        for price, same in groups.items()
    ]


def tables_of(lines: Lines) -> str:
    """Return median errors, then speeds and parts of a round at each price, in Markdown."""
    rows = rows_of(lines)
    tables = [_table(summary_cells(rows))]
    for price in dict.fromkeys(row["price"] for row in rows):
        same = [row for row in rows if row["price"] == price]
        tables.append(f"Target at the price of {price}:" if price != "none" else "Target at its own price:")
        tables.append(_table([error_cells(row) for row in same]))
        tables.append("A round of these:")
        tables.append(_table([part_cells(row) for row in same]))
    return "\n\n".join(tables)


def _table(rows: Sequence[dict[str, str]]) -> str:
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables of a file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="lines of planner_validation.py")
    try:
        print(tables_of(options.read_lines(parser.parse_args(argv).file, "planner_validation")))
    except BenchError as error:
        print(f"validation_report.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
