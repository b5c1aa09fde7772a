"""Draw what judges cost and earn: how many answers stay the same against tokens a pass.

    python benchmarks/plot_frontier.py benchmarks/results/judges.jsonl.gz --out judges.png

Takes a file of `judges.py`, with a picture for each data set, or the last run of a file of `card bench` whose questions
have answers. Rows that are exact are the end point of every judge, whose knobs are joined by a line. Needs matplotlib:
pip install '.[bench]'. No display is needed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import judges
import options
from packed import unpacked
from pages import STYLES, add_grid, new_figure, write_png

from card.errors import BenchError
from card.tools.bench.records import Run
from card.tools.bench.results import load
from card.tools.bench.row_names import JUDGED
from card.tools.bench.summary import Share, summarise

_EXACT = ("#333333", "*")
_PANEL_IN = (6.4, 4.6)
_DOTS_PER_INCH = 130
_LABEL_PT, _NOTE_PT = 12, 8


@dataclass(frozen=True, slots=True)
class Point:
    """One row: its judge without the knob, empty if it is exact, and its figures."""

    judge: str
    knob: str  # as it was given; empty for the usual one
    tokens_per_pass: float
    share: Share


def points(run: Run, *, solved: bool) -> list[Point]:
    """Return the rows of a run that have candidates and questions with answers.

    Args:
        solved: the share is that of solved questions; else that of texts which end with the baseline's number.
    """
    found = []
    for summary in summarise(run):
        share = summary.solved if solved else summary.same_number
        if (
            share is not None
            and summary.costs.mean_acceptance_length is not None
            and run.facts_of(summary.row).method != "vanilla"
        ):
            is_exact = run.facts_of(summary.row).is_exact
            judge = "" if is_exact else summary.row.partition(JUDGED)[2]
            found.append(Point(*_parts(judge), summary.costs.mean_acceptance_length, share))
    return found


def points_by_data(lines: Sequence[dict[str, Any]], *, solved: bool) -> dict[str, list[Point]]:
    """Return the rows of lines of `judges.py`, by data set and number of questions; `solved` as for `points`."""
    found: dict[str, list[Point]] = {}
    for row in judges.summarise(lines):
        judge = "" if row.judge == judges.EXACT else row.judge
        point = Point(*_parts(judge), row.tokens_per_pass, row.solved if solved else row.same)
        found.setdefault(f"{row.num_questions} questions of {row.data}", []).append(point)
    return found


def _parts(judge: str) -> tuple[str, str]:
    """Return the name of a judge, without folder, and its knob."""
    name, has_knob, knob = Path(judge).name.rpartition(":")
    return (name, knob) if has_knob else (knob, "")


def read(path: Path, *, solved: bool) -> tuple[dict[str, list[Point]], str]:
    """Return the points of each panel by its title, and a note of what was asked. Raises: BenchError, OSError."""
    with unpacked(path) as file:
        with file.open(encoding="utf-8") as lines:
            is_of_judges = f'"benchmark": "{judges.BENCHMARK}"' in lines.readline()
        if not is_of_judges:
            run = load(file)[-1]
            data = ", ".join(f"{one.num_prompts} questions of {Path(one.source).name}" for one in run.workloads)
            pairs = ", ".join(pair.name for pair in run.pairs)
            return {data: points(run, solved=solved)}, f"{pairs}, {run.dtype}, T = {run.sampling.temperature:g}"
        found = options.read_lines(file, judges.BENCHMARK)
    return points_by_data(found, solved=solved), "{target}, {draft}, T = 0".format_map(found[0])


def draw(panels: Mapping[str, Sequence[Point]], label: str, note: str, path: Path) -> None:
    """Write a PNG with a panel for each title; the folder is made if it does not exist."""
    width, height = _PANEL_IN
    figure = new_figure(width * len(panels), height)
    names = [name for name in dict.fromkeys(p.judge for found in panels.values() for p in found) if name]
    styles = {"": _EXACT, **dict(zip(names, itertools.cycle(STYLES)))}
    for (title, found), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        _draw_panel(axes, found, styles)
        axes.set_title(title, fontsize=_LABEL_PT)
        axes.set_xlabel("tokens a pass of the target", fontsize=_LABEL_PT)
        axes.set_ylabel(label, fontsize=_LABEL_PT)
    marks = [figure.axes[0].plot([], [], color=c, marker=m, label=judge or "exact") for judge, (c, m) in styles.items()]
    figure.legend(
        handles=[line for (line,) in marks], loc="outside upper center", ncols=3, fontsize=_LABEL_PT, frameon=False
    )
    figure.supxlabel(f"{note}, 95 % intervals (Wilson), numbers are knobs", fontsize=_NOTE_PT, color="#555555")
    write_png(figure, path, _DOTS_PER_INCH)


def _draw_panel(axes: Any, found: Sequence[Point], styles: Mapping[str, tuple[str, str]]) -> None:
    """Draw each judge's points with their intervals, and a line through them from the exact point on."""
    exact = [point for point in found if not point.judge]
    for judge, (colour, marker) in styles.items():
        own = sorted((p for p in found if p.judge == judge), key=lambda point: point.tokens_per_pass)
        line = own if not judge else [*exact[:1], *own] if own else []
        axes.plot([p.tokens_per_pass for p in line], [100 * p.share.count / p.share.of for p in line], color=colour)
        for point in own:
            least, most = point.share.interval
            middle = point.share.count / point.share.of
            below, above = max(0.0, middle - least), max(0.0, most - middle)  # rounding may leave less than nothing
            spans, size = [[100 * below], [100 * above]], 13 if not judge else 8
            place = point.tokens_per_pass, 100 * middle
            axes.errorbar(*place, yerr=spans, color=colour, fmt=marker, markersize=size, capsize=3)
            axes.annotate(point.knob, place, xytext=(7, 5), textcoords="offset points", fontsize=_NOTE_PT, color=colour)
    axes.set_ylim(-3, 105)
    add_grid(axes)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a file's judges. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="file of judges.py or card bench; may be packed (.gz)")
    parser.add_argument("--out", type=Path, default=Path("judges.png"), help="default: %(default)s")
    parser.add_argument("--solved", action="store_true", help="draw solved questions instead of answers that stay")
    args = parser.parse_args(argv)
    try:
        panels, note = read(args.file, solved=args.solved)
    except (BenchError, OSError) as error:
        print(f"plot_frontier.py: error: {error}", file=sys.stderr)
        return 2
    if not any(panels.values()):
        print("plot_frontier.py: error: no row to show; the questions need answers", file=sys.stderr)
        return 2
    draw(panels, "questions solved, %" if args.solved else "same final number as exact, %", note, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
