"""Draw how fast each method is against plain decoding on the same cores, from a file of `card bench`.

    python benchmarks/plot.py methods.jsonl --out methods.png

Takes the last run of the file. Needs matplotlib: pip install '.[bench]'. No display is needed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packed import unpacked
from pages import STYLES, add_grid, add_note, new_figure, write_png

from card.errors import BenchError
from card.tools.bench.records import Run
from card.tools.bench.results import load
from card.tools.bench.summary import Spread, summarise

_WIDTH_IN, _ROW_IN, _MARGIN_IN = 6.4, 0.42, 1.8  # a phone shows it at about half this width
_NOTE_IN = 0.45  # for the two lines below
_LONGEST_LABEL = 20  # characters in a line
_LABEL_PT, _NOTE_PT = 13, 9


def points(run: Run) -> dict[str, dict[str, Spread]]:
    """Return each method's tokens/s over the baseline's, repeat by repeat, by pair and workload."""
    found: dict[str, dict[str, Spread]] = {}
    for summary in summarise(run):
        if summary.speedup is not None and summary.row != run.baseline:
            name = summary.workload if len(run.pairs) == 1 else f"{summary.pair}, {summary.workload}"
            found.setdefault(name, {})[summary.row] = summary.speedup
    return found


def by_speed(found: Mapping[str, Mapping[str, Spread]]) -> list[str]:
    """Return the methods, slowest first, by the geometric mean of what they have over workloads."""
    methods = dict.fromkeys(method for of_workload in found.values() for method in of_workload)

    def mean(method: str) -> float:
        medians = [of_workload[method].median for of_workload in found.values() if method in of_workload]
        return statistics.geometric_mean(medians) if min(medians) > 0 else 0.0

    return sorted(methods, key=mean)


def draw(found: Mapping[str, Mapping[str, Spread]], note: str, path: Path) -> None:
    """Write a PNG with a line per method and a mark per workload; the folder is made if it does not exist."""
    methods = by_speed(found)
    figure = new_figure(_WIDTH_IN, _MARGIN_IN + _ROW_IN * len(methods))
    axes = figure.subplots()
    axes.axvspan(0, 1, color="#F3E3E3", zorder=0)
    axes.axvline(1, color="#444444", linewidth=1.5, zorder=1)
    offsets = [0.18 * (i - (len(found) - 1) / 2) for i in range(len(found))]
    for (workload, of_workload), (colour, marker), offset in zip(found.items(), itertools.cycle(STYLES), offsets):
        heights = [methods.index(method) - offset for method in of_workload]
        all_points = list(of_workload.values())
        medians = [point.median for point in all_points]
        spans = ([p.median - p.least for p in all_points], [p.most - p.median for p in all_points])
        axes.errorbar(
            medians, heights, xerr=spans, fmt=marker, color=colour, markersize=8, elinewidth=1.2, label=workload
        )
    axes.set_yticks(range(len(methods)), map(_label, methods), fontsize=_LABEL_PT)
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.set_xlim(left=0)
    axes.tick_params(axis="x", labelsize=_LABEL_PT)
    add_grid(axes)
    axes.set_xlabel("tokens/s, as a multiple of\nplain decoding's on all cores", fontsize=_LABEL_PT)
    axes.text(0.97, len(methods) - 0.55, "slower ", ha="right", va="top", fontsize=_NOTE_PT + 1, color="#8A3A3A")
    figure.legend(loc="outside upper center", ncols=min(3, len(found)), fontsize=_LABEL_PT, frameon=False)
    add_note(figure, note, _NOTE_IN, size_pt=_NOTE_PT)
    write_png(figure, path)


def _label(method: str) -> str:
    """Return the method's name, a long one in two lines."""
    cut = method.removesuffix("-all-cores")
    return method if len(method) <= _LONGEST_LABEL or cut == method else f"{cut}\n-all-cores"


def note_of(run: Run) -> str:
    """Return in two short lines what was measured where."""
    prompts = sorted({workload.num_prompts for workload in run.workloads})
    counts = f"{prompts[0]}–{prompts[-1]}" if len(prompts) > 1 else f"{prompts[0]}"
    costs = [pair.target_cost.partition(" ")[0] for pair in run.pairs if pair.target_cost]
    cost = f", target at the cost of {' and '.join(costs)} parameters" if costs else ""
    return (
        f"{run.machine['cpu']}, {run.machine['cores']} cores, {run.dtype}{cost}\n"
        f"{counts} prompts a workload, median and range of {run.repeats} runs, T = {run.sampling.temperature:g}, "
        f"commit {run.commit[:12]}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the last run of a file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="file of card bench; may be packed (.gz)")
    parser.add_argument("--out", type=Path, default=Path("methods.png"), help="default: %(default)s")
    parser.add_argument("--methods", default="", help="rows to show, with commas (default: all)")
    args = parser.parse_args(argv)
    try:
        with unpacked(args.file) as lines:
            run = load(lines)[-1]
    except (BenchError, OSError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    found = points(run)
    wanted = [name for name in args.methods.split(",") if name]
    if wanted:
        found = {w: {m: of[m] for m in of if m in wanted} for w, of in found.items()}
    if not any(found.values()):
        print(f"plot.py: error: no row to show; the run needs {run.baseline} and another method", file=sys.stderr)
        return 2
    draw(found, note_of(run), args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
