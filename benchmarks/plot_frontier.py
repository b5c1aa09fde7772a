"""Draw what judges cost and earn: how many answers stay the same against tokens a pass, from a file of `card bench`.

    python benchmarks/plot_frontier.py benchmarks/results/judges.jsonl.gz --out docs/images/judges.png

Takes the last run of the file; its questions need answers. Rows that are exact are the end point of every judge, whose
knobs are joined by a line. Needs matplotlib: pip install 'card-decoding[bench]'. No display is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packed import unpacked

from card.bench.names import JUDGED
from card.bench.records import Run
from card.bench.results import load
from card.bench.summary import RowSummary, Share, summarise
from card.errors import BenchError

_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
_EXACT = ("#333333", "*")
_SIZE_IN = (6.4, 4.6)
_DOTS_PER_INCH = 130
_LABEL_PT, _NOTE_PT = 12, 8


@dataclass(frozen=True, slots=True)
class Point:
    """One row: its judge without the knob, empty if it is exact, and its figures."""

    judge: str
    knob: str  # as it was given; empty for the usual one
    row: str
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
            found.append(Point(*_judge(run, summary), summary.row, summary.costs.mean_acceptance_length, share))
    return found


def _judge(run: Run, summary: RowSummary) -> tuple[str, str]:
    """Return a row's judge and knob."""
    if run.facts_of(summary.row).is_exact:
        return "", ""
    judge = Path(summary.row.partition(JUDGED)[2]).name
    name, has_knob, knob = judge.rpartition(":")
    return (name, knob) if has_knob else (judge, "")


def note_of(run: Run) -> str:
    """Return in two short lines what was asked of whom."""
    pairs = ", ".join(pair.name for pair in run.pairs)
    data = ", ".join(f"{one.num_prompts} questions of {Path(one.source).name}" for one in run.workloads)
    return f"{pairs}, {run.dtype}, T = {run.sampling.temperature:g}\n{data}, 95 % intervals (Wilson), numbers are knobs"


def draw(found: Sequence[Point], label: str, note: str, path: Path) -> None:
    """Write a PNG; the folder is made if it does not exist."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    axes = figure.subplots()
    exact = [point for point in found if not point.judge]
    for i, judge in enumerate(dict.fromkeys(point.judge for point in found)):
        own = sorted((p for p in found if p.judge == judge), key=lambda point: point.tokens_per_pass)
        colour, marker = _STYLES[i % len(_STYLES)] if judge else _EXACT
        line = own if not judge else [*exact[:1], *own]
        axes.plot([p.tokens_per_pass for p in line], [100 * p.share.count / p.share.of for p in line], color=colour)
        for point in own:
            least, most = point.share.interval
            middle = point.share.count / point.share.of
            spans = [[100 * (middle - least)], [100 * (most - middle)]]
            size = 13 if not judge else 8
            axes.errorbar(
                [point.tokens_per_pass],
                [100 * middle],
                yerr=spans,
                color=colour,
                fmt=marker,
                markersize=size,
                capsize=3,
            )
            place = point.tokens_per_pass, 100 * middle
            axes.annotate(point.knob, place, xytext=(7, 5), textcoords="offset points", fontsize=_NOTE_PT, color=colour)
        axes.plot([], [], color=colour, marker=marker, label=judge or "exact")
    axes.set_xlabel("tokens a pass of the target", fontsize=_LABEL_PT)
    axes.set_ylabel(label, fontsize=_LABEL_PT)
    axes.set_ylim(-3, 105)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=3, fontsize=_LABEL_PT, frameon=False)
    figure.supxlabel(note, fontsize=_NOTE_PT, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the last run of a file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="file of card bench; may be packed (.gz)")
    parser.add_argument("--out", type=Path, default=Path("docs/images/judges.png"), help="default: %(default)s")
    parser.add_argument("--solved", action="store_true", help="draw solved questions instead of answers that stay")
    args = parser.parse_args(argv)
    try:
        with unpacked(args.file) as lines:
            run = load(lines)[-1]
    except (BenchError, OSError) as error:
        print(f"plot_frontier.py: error: {error}", file=sys.stderr)
        return 2
    found = points(run, solved=args.solved)
    if not found:
        print("plot_frontier.py: error: no row to show; the questions need answers", file=sys.stderr)
        return 2
    draw(found, "questions solved, %" if args.solved else "same final number as exact, %", note_of(run), args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
