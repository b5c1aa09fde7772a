"""Draw tokens per target pass, hits and speed over the cache width: published, measured and simulated.

python benchmarks/paper/draw.py        # writes docs/images/paper_width.png; needs the extra `bench`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[1]))
from pages import BLUE, GREEN, ORANGE, PINK, YELLOW, new_figure, write_png
from published import BEST_SPEED_UP, SWEEP
from tables import RESULTS, Line, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "paper_width.png"
_TITLES = {"gsm8k": "GSM8K", "mt-bench": "MT-bench"}
_LABELS = ("tokens per target pass", "share of rounds\nthat hit", "speed-up\n(times plain decoding)")
_BOTTOMS, _TOPS = (1.0, 0.6, 1.0), (7.0, 1.01, 7.0)
_STYLES = {
    "published": (*BLUE, "-"),
    "measured": (*ORANGE, "-"),
    "simulated": (*GREEN, "--"),
    "flat": (*GREEN, "--"),
    "busy": (*PINK, "--"),
    "own": (*YELLOW, "--"),
}
_PEAK_PT = {"flat": 7, "busy": -16, "own": 20}  # from a peak to its figure, clear of the other curves
_NAMES = {
    "published": "published: Llama 1B and 70B (from the result files)",
    "measured": "measured: our 4 M and 15 M",
    "simulated": "simulated: made-up pair, fitted at K = 5 and 45, on published latencies",
    "busy": "the same with our bookkeeping",
    "own": "simulated: our pair's recording, measured latencies, our bookkeeping",
}

Curve = dict[int, tuple[float, float]]  # K: (tokens per target pass, hit rate)
Speeds = dict[int, float]  # K: times plain decoding


def curves(lines: Sequence[Line], workload: str) -> dict[str, Curve]:
    """Return tokens and hits of a workload: published, measured and simulated, as far as they are known."""
    found: dict[str, Curve] = {
        "published": {p.beam_width: (p.tokens_per_pass, 1.0 - p.miss_rate) for p in SWEEP[workload]}
    }
    for line in _chosen(lines, workload):
        if not line.get("bookkeeping") and not line.get("latencies_measured"):
            found.setdefault(line["basis"], {})[line["beam_width"]] = (line["tokens_per_pass"], line["hit_rate"])
    return found


def speeds(lines: Sequence[Line], workload: str) -> dict[str, Speeds]:
    """Return the simulated speeds of a workload: published latencies without and with bookkeeping, and our pair's."""
    found: dict[str, Speeds] = {}
    for line in _chosen(lines, workload):
        if "speed_up" not in line or (line["latencies_measured"] and not line["bookkeeping"]):
            continue
        name = "own" if line["latencies_measured"] else "busy" if line["bookkeeping"] else "flat"
        found.setdefault(name, {})[line["beam_width"]] = line["speed_up"]
    return found


def draw(lines: Sequence[Line], workloads: Sequence[str]) -> Figure:
    """Return the picture: a column per workload, below each other tokens, hits and speed."""
    figure = new_figure(8.4, 9.4)
    axes = figure.subplots(3, len(workloads), sharex=True, sharey="row", squeeze=False)
    named: set[str] = set()
    for column, workload in enumerate(workloads):
        for basis, curve in curves(lines, workload).items():
            for row in (0, 1):
                _plot(axes[row][column], basis, {width: both[row] for width, both in curve.items()}, named)
        for basis, found in speeds(lines, workload).items():
            _plot(axes[2][column], basis, found, named)
            _mark_peak(axes[2][column], basis, found)
        axes[2][column].axhline(BEST_SPEED_UP, color=_STYLES["published"][0], linewidth=1.5, linestyle=":")
        axes[0][column].set_title(_TITLES[workload], fontsize=13)
        axes[2][column].set_xlabel("cache width K (nodes per layer)", fontsize=12)
    axes[2][-1].annotate(
        f"published: up to {BEST_SPEED_UP}, over all data",
        (205, BEST_SPEED_UP),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        color=_STYLES["published"][0],
        fontsize=10,
    )
    for row, label in enumerate(_LABELS):
        axes[row][0].set_ylabel(label, fontsize=12)
        axes[row][0].set_ylim(_BOTTOMS[row], _TOPS[row])
        for one in axes[row]:
            one.grid(color="#DDDDDD", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=1, fontsize=11, frameon=False)
    return figure


def _chosen(lines: Sequence[Line], workload: str) -> list[Line]:
    return [line for line in lines if line["kind"] == "width" and line["workload"] == workload]


def _plot(axes: Axes, basis: str, heights: Mapping[int, float], named: set[str]) -> None:
    """Draw a curve; a name enters the legend once."""
    colour, marker, dash = _STYLES[basis]
    widths = sorted(heights)
    label = _NAMES.get(basis) if basis not in named else None
    named.add(basis)
    values = [heights[width] for width in widths]
    axes.plot(widths, values, dash, color=colour, marker=marker, markersize=6, label=label)


def _mark_peak(axes: Axes, basis: str, found: Speeds) -> None:
    """Write its height at the fastest width."""
    width = max(found, key=lambda one: found[one])
    axes.annotate(
        f"{found[width]:.2f}",
        (width, found[width]),
        xytext=(0, _PEAK_PT[basis]),
        textcoords="offset points",
        ha="center",
        color=_STYLES[basis][0],
        fontsize=10,
        fontweight="bold",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what was measured last. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=IMAGE, help="default: %(default)s")
    args = parser.parse_args(argv)
    write_png(draw(read_lines(args.results), tuple(SWEEP)), args.out, dots_per_inch=150)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
