"""Draw tokens per target pass and hits over the cache width: published, measured and simulated.

python benchmarks/paper/draw.py        # writes docs/images/paper_width.png; needs the extra `bench`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from published import SWEEP
from tables import RESULTS, Line, read_lines

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "paper_width.png"
_TITLES = {"gsm8k": "GSM8K", "mt-bench": "MT-bench"}
# Colours that differ for colour-blind readers too (Okabe & Ito 2008), each with a marker of its own.
_STYLES = {
    "published": ("#0072B2", "o", "-"),
    "measured": ("#D55E00", "s", "-"),
    "simulated": ("#009E73", "^", "--"),
}
_LABELS = {
    "published": "published: 1B and 70B (their repository's data)",
    "measured": "measured: our 4M and 15M",
    "simulated": "simulated: made-up pair, fitted at K = 5 and 45",
}

Curve = dict[int, tuple[float, float]]  # K: (tokens per target pass, hit rate)


def curves(lines: Sequence[Line], workload: str) -> dict[str, Curve]:
    """Return what is known of a workload."""
    found: dict[str, Curve] = {
        "published": {p.beam_width: (p.tokens_per_pass, 1.0 - p.miss_rate) for p in SWEEP[workload]}
    }
    for line in lines:
        is_wanted = line["kind"] == "width" and line["workload"] == workload
        if is_wanted and not line.get("bookkeeping") and not line.get("latencies_measured"):
            found.setdefault(line["basis"], {})[line["beam_width"]] = (line["tokens_per_pass"], line["hit_rate"])
    return found


def draw(by_workload: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Write a PNG: a column per workload, tokens above hits; the folder is made if it does not exist."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 6.4), layout="constrained")
    axes = figure.subplots(2, len(by_workload), sharex=True, sharey="row", squeeze=False)
    for column, (workload, found) in enumerate(by_workload.items()):
        for row, name in enumerate(("tokens per target pass", "hits per round")):
            one = axes[row][column]
            for basis, curve in found.items():
                colour, marker, dash = _STYLES[basis]
                widths = sorted(curve)
                heights = [curve[width][row] for width in widths]
                label = _LABELS[basis] if row == column == 0 else None
                one.plot(widths, heights, dash, color=colour, marker=marker, markersize=6, label=label)
            one.grid(color="#DDDDDD", linewidth=0.8)
            if column == 0:
                one.set_ylabel(name, fontsize=12)
        axes[0][column].set_title(_TITLES[workload], fontsize=12)
        axes[1][column].set_xlabel("cache width K (nodes per layer)", fontsize=12)
    axes[0][0].set_ylim(bottom=1.0, top=7.0)
    axes[1][0].set_ylim(top=1.0)
    figure.legend(loc="outside upper center", ncols=1, fontsize=11, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=150, format="png", metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what was measured last. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the lines (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=IMAGE, help="default: %(default)s")
    args = parser.parse_args(argv)
    lines = read_lines(args.results)
    draw({workload: curves(lines, workload) for workload in SWEEP}, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
