"""Draw the fastest row of each engine and number of bits, from the lines of `run.py`.

    python benchmarks/peers/peer_plot.py benchmarks/results/peers_*M_intel.jsonl.gz --out docs/images/peers.png

A mark per set of prompts, a panel per model. Needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import peer_table
from catalog import BITS, OURS
from pages import STYLES, add_grid, add_note, new_figure, write_png
from peer_results import Line, Summary, groups, read_lines, summarise

_WIDTH_IN, _ROW_IN, _PANEL_IN, _NOTE_IN = 7.2, 0.34, 0.7, 0.9
_LABEL_PT, _NOTE_PT = 11, 7
_NOTE_CHARACTERS = 130  # in a line


def fastest_rows(lines: Sequence[Line]) -> dict[str, dict[str, dict[str, Summary]]]:
    """Return the fastest summary by model, set of prompts and label; single requests only."""
    found: dict[str, dict[str, dict[str, Summary]]] = {}
    for of_group in groups(line for line in lines if line["kind"] == "decode").values():
        best: dict[str, Summary] = {}
        for summary in summarise(of_group):  # the fastest one comes first
            best.setdefault(f"{summary.row.peer}, {BITS[summary.row.quantisation]} bits", summary)
        found.setdefault(of_group[0]["model"], {})[of_group[0]["prompts"]] = best
    return found


def labels_of(panel: Mapping[str, Mapping[str, Summary]]) -> list[str]:
    """Return the labels of a panel, the slowest first, by the mean of ranks over sets of prompts."""
    labels = dict.fromkeys(label for of_set in panel.values() for label in of_set)

    def rank(label: str) -> float:
        ranks = [list(of_set).index(label) for of_set in panel.values() if label in of_set]
        return sum(ranks) / len(ranks)

    return sorted(labels, key=rank, reverse=True)


def draw(found: Mapping[str, Mapping[str, Mapping[str, Summary]]], note: str, path: Path) -> None:
    """Write a PNG; its folder is made if it does not exist."""
    heights = [_PANEL_IN + _ROW_IN * len(labels_of(panel)) for panel in found.values()]
    figure = new_figure(_WIDTH_IN, sum(heights) + _NOTE_IN)
    panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    sets = list(dict.fromkeys(name for panel in found.values() for name in panel))
    for axes, (model, panel) in zip(panels, found.items(), strict=True):
        labels = labels_of(panel)
        for name, of_set in panel.items():
            colour, marker = STYLES[sets.index(name) % len(STYLES)]
            rates = [summary.tokens_per_s for summary in of_set.values()]
            spans = (
                [summary.tokens_per_s - summary.least for summary in of_set.values()],
                [summary.most - summary.tokens_per_s for summary in of_set.values()],
            )
            places = [labels.index(label) for label in of_set]
            axes.errorbar(rates, places, xerr=spans, fmt=marker, color=colour, markersize=7, label=name)
        axes.set_yticks(range(len(labels)), labels, fontsize=_LABEL_PT)
        for tick, label in zip(axes.get_yticklabels(), labels, strict=True):
            tick.set_fontweight("bold" if label.startswith(f"{OURS},") else "normal")
        axes.set_ylim(-0.6, len(labels) - 0.4)
        axes.set_xlim(left=0)
        add_grid(axes)
        axes.set_title(model, fontsize=_LABEL_PT)
    panels[-1].set_xlabel("tokens/s, the fastest method of each engine", fontsize=_LABEL_PT)
    handles = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=3, fontsize=_LABEL_PT, frameon=False)
    add_note(figure, textwrap.fill(note, _NOTE_CHARACTERS), 0.5 * _NOTE_IN, left=0.01, size_pt=_NOTE_PT)
    write_png(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the last run of each file. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", help="files of benchmarks/peers/run.py")
    parser.add_argument("--out", type=Path, default=Path("docs/images/peers.png"), help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        lines = [line for file in args.files for line in read_lines(file)]
    except (OSError, ValueError) as error:
        print(f"peer_plot.py: error: {error}", file=sys.stderr)
        return 2
    found = fastest_rows(lines)
    if not found:
        print("peer_plot.py: error: the run has no single requests to show", file=sys.stderr)
        return 2
    draw(found, peer_table.note(lines), args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
