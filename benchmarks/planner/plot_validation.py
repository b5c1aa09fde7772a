"""Draw what the planner said against what was measured, from the lines of `planner_validation.py`.

    python benchmarks/planner/plot_validation.py benchmarks/results/planner_validation.jsonl

A mark for each method at each price of the target; those outside the band of 10 % are named. Needs matplotlib:
pip install '.[bench]'. No display is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options
from pages import STYLES, add_grid, add_note, new_figure, write_png
from validation_report import median_errors, rows_of

from card.errors import BenchError
from card.tools.bench.row_names import BASELINE

_SIDE_IN, _NOTE_IN = 6.4, 0.6  # a phone shows it at about half this width
_LABEL_PT, _NAME_PT, _NOTE_PT = 13, 9, 9
_BAND = 0.1  # the band that is drawn
_NAMED = 0.2  # error from which on a method is named
_MARGIN = 1.3  # beyond the least and the most
_FEW, _MANY = 1.6, 20.0  # spans of an axis, as factors, from which on it has fewer marks


def draw(rows: Sequence[dict[str, Any]], note: str, path: Path) -> None:
    """Write a PNG of planned over measured figures, both axes logarithmic; the folder is made if need be."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    figure = new_figure(_SIDE_IN, _SIDE_IN + _NOTE_IN)
    axes = figure.subplots()
    values = [row[name] for row in rows for name in ("measured_ratio", "planned_ratio")]
    ends = [min(values) / _MARGIN, max(values) * _MARGIN]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.fill_between(
        ends,
        [end * (1 - _BAND) for end in ends],
        [end * (1 + _BAND) for end in ends],
        color="#E8E8E8",
        linewidth=0,
        label="±10 %",
        zorder=0,
    )
    axes.plot(ends, ends, color="#444444", linewidth=1.5, zorder=1)
    for number, price in enumerate(dict.fromkeys(row["price"] for row in rows)):
        colour, marker = STYLES[number % len(STYLES)]
        same = [row for row in rows if row["price"] == price]
        points = [row["measured_ratio"] for row in same], [row["planned_ratio"] for row in same]
        axes.scatter(*points, color=colour, marker=marker, s=45, alpha=0.85, label=name_of(price), zorder=3)
        for row in same:
            if abs(row["ratio_error"]) >= _NAMED:
                is_high = row["ratio_error"] > 0
                axes.annotate(
                    row["row"],
                    (row["measured_ratio"], row["planned_ratio"]),
                    xytext=(-6 if is_high else 6, 3 if is_high else -9),
                    textcoords="offset points",
                    ha="right" if is_high else "left",
                    fontsize=_NAME_PT,
                    color=colour,
                )
    marks = [mark for mark in _marks(ends[1] / ends[0]) if ends[0] <= mark <= ends[1]]
    for axis, what in ((axes.xaxis, "measured"), (axes.yaxis, "planned")):
        axis.set_major_locator(FixedLocator(marks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
        axis.set_label_text(f"{what}: tokens/s over plain decoding's on all cores", fontsize=_LABEL_PT - 1)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.tick_params(labelsize=_LABEL_PT - 1)
    add_grid(axes)
    axes.legend(title="target at the price of", fontsize=_LABEL_PT - 2, title_fontsize=_LABEL_PT - 2, loc="upper left")
    add_note(figure, note, _NOTE_IN, size_pt=_NOTE_PT)
    write_png(figure, path)


def _marks(span: float) -> list[float]:
    """Return round numbers to mark on an axis whose end is so many times its beginning."""
    steps: Sequence[float] = (1, 2, 5) if span > _MANY else (1, 1.5, 2, 3, 4, 6, 8)
    if span < _FEW:
        steps = [step / 10 for step in range(10, 100)]
    return [step * 10.0**power for power in range(-3, 5) for step in steps]


def name_of(price: str) -> str:
    """Return how a price is written in the legend."""
    return "its own size" if price == "none" else f"{price} parameters"


def note_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return in three short lines what was measured where."""
    line, errors = rows[-1], median_errors(rows)
    shown = ", ".join(f"{what} {error:.1%}" for what, error in errors.items())
    return (
        f"{line['machine']['cpu']}, {line['machine']['cores']} cores, {line['dtype']}, commit {line['commit'][:12]}\n"
        f"{line['num_prompts']} prompts, {line['max_tokens']} tokens at most, median of {line['repeats']} runs\n"
        f"median error: {shown}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the last run of each price in a file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="lines of planner_validation.py")
    parser.add_argument("--out", type=Path, default=Path("docs/images/planner_validation.png"), help="%(default)s")
    args = parser.parse_args(argv)
    try:
        lines = rows_of(options.read_lines(args.file, "planner_validation"))
    except BenchError as error:
        print(f"plot_validation.py: error: {error}", file=sys.stderr)
        return 2
    rows = [line for line in lines if line["row"] != BASELINE]
    if not rows:
        print(f"plot_validation.py: error: {args.file} has no method to show beside {BASELINE}", file=sys.stderr)
        return 2
    draw(rows, note_of(rows), args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
