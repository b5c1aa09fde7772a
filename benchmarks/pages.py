"""Tables and pictures as our pages show them: one look for all scripts. Pictures need matplotlib, and no display."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ for colour-blind readers too (Okabe & Ito 2008), each with a marker of its own.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
BLUE, ORANGE, GREEN, PINK, YELLOW, _ = STYLES


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1, last: str = "---:") -> str:
    """Return a table in Markdown: numbers stand to the right, and words to the left.

    Args:
        num_words: columns of words before those of numbers.
        last: rule of the last column.
    """
    rule = [*["---"] * num_words, *["---:"] * (len(columns) - num_words - 1), last]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty picture."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def add_grid(axes: Axes) -> None:
    """Put thin lines behind all that is drawn."""
    axes.grid(axis="both", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def add_note(figure: Figure, note: str, height_in: float, *, left: float = 0.02, size_pt: float = 9) -> None:
    """Write in small letters below a picture, and leave as much room for them."""
    figure.text(left, 0.0, note, fontsize=size_pt, color="#555555", va="bottom")
    share = height_in / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))


def write_png(figure: Figure, path: Path, dots_per_inch: int = 200) -> None:
    """Write a picture; its folder is made if it does not exist."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=dots_per_inch, format="png", metadata={"Software": None})
