"""How plots look: colours that follow the reader's light or dark mode, text that is legible on a phone, SVG and PNG."""

from __future__ import annotations

import io
import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from card.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each colour of the light mode, and the one that takes its place in the dark: all differ from each other, as plots are
# recoloured by them. Series colours differ for colour-blind readers too (Okabe & Ito 2008, darkened for white paper).
COLOURS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "muted": ("#57606a", "#9aa5b1"),
    "grid": ("#d8dee4", "#30363d"),
    "paper": ("#ffffff", "#12161c"),
    "gain": ("#0b6bcb", "#5aa9ff"),
    "loss": ("#b3361b", "#ff8a6b"),
    "second": ("#8a5a00", "#e3a83b"),
    "third": ("#0a7a4b", "#3fc98a"),
    "fourth": ("#8e3a8c", "#d98ad7"),
    "fifth": ("#3d4b5c", "#b9c4d0"),
}
INK, MUTED, GRID, PAPER, GAIN, LOSS, SECOND, THIRD, FOURTH, FIFTH = (light for light, _ in COLOURS.values())
SERIES = ((GAIN, "o"), (SECOND, "s"), (THIRD, "^"), (FOURTH, "D"), (FIFTH, "v"))

WIDTH_PT = 360.0  # shown 343 pixels wide on a phone of 375, so that 15 points are more than 14 pixels
TEXT_PT = 15.0
LINE_PT = 20.0  # from one line of text to the next
MARGIN_PT = 10.0
_TITLE_PT = 16.0
_HINTING = 1.04  # letters fitted to the grid of a screen are wider by so much at most
_RIGHT_PT = 22.0  # beside the axes: half of the last number stands there
_MARK_PT = 21.0  # that a mark of the key takes, with the gap behind it
INSIDE_PT = WIDTH_PT - MARGIN_PT - _RIGHT_PT  # of axes without labels to their left
_DOTS_PER_INCH = 200
_POINTS_PER_INCH = 72.0
_FONTS = "system-ui, sans-serif"


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot, with what it says for those who do not see it."""

    name: str  # of its file, without ending: letters, digits, hyphens
    title: str
    where: str  # what it shows this of; empty if the title says it
    alt: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Key:
    """What a colour or mark means."""

    label: str
    colour: str
    marker: str = "s"


def text_width_pt(text: str, *, size_pt: float = TEXT_PT, is_bold: bool = False) -> float:
    """Return how wide a text is drawn in matplotlib's own font, which is wider than most.

    Raises: BenchError if matplotlib is missing.
    """
    try:
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import text_to_path
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install 'card-decoding[bench]', or ask for --csv alone") from error
    font = FontProperties(size=size_pt, weight="bold" if is_bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return _HINTING * float(width)


def wrapped(text: str, width_pt: float, *, size_pt: float = TEXT_PT, is_bold: bool = False) -> list[str]:
    """Return a text in lines no wider than ``width_pt``, broken at spaces, and within words that are too long."""

    def fits(line: str) -> bool:
        return text_width_pt(line, size_pt=size_pt, is_bold=is_bold) <= width_pt

    lines: list[str] = []
    line = ""
    for word in text.split():
        rest = f"{line} {word}" if line else word
        if line and not fits(rest):
            lines.append(line)
            rest = word
        while not fits(rest):
            count = bisect(range(1, len(rest)), False, key=lambda end: not fits(rest[:end]))
            lines.append(rest[: max(count, 1)])
            rest = rest[max(count, 1) :]
        line = rest
    return [*lines, line] if line else lines


def blank(
    title: str,
    body_pt: float,
    *,
    x_label: str,
    y_label: str = "",
    left_pt: float = MARGIN_PT,
    keys: Sequence[Key] = (),
) -> tuple[Figure, Axes]:
    """Return an empty figure with title, key and axes whose inside is ``body_pt`` points high.

    Raises: BenchError if matplotlib is missing.
    """
    width_pt = WIDTH_PT - 2 * MARGIN_PT
    titles = wrapped(title, width_pt, size_pt=_TITLE_PT, is_bold=True)
    labels = [wrapped(key.label, width_pt - _MARK_PT) for key in keys]
    x_labels = wrapped(x_label, WIDTH_PT - left_pt - _RIGHT_PT)
    from matplotlib.figure import Figure

    above_pt = MARGIN_PT + LINE_PT * (len(titles) + sum(map(len, labels)) + bool(y_label)) + 8
    below_pt = LINE_PT * (1 + len(x_labels)) + 12
    height_pt = above_pt + body_pt + below_pt
    figure = Figure(figsize=(WIDTH_PT / _POINTS_PER_INCH, height_pt / _POINTS_PER_INCH), facecolor=PAPER)
    inside_pt = WIDTH_PT - left_pt - _RIGHT_PT
    axes = figure.add_axes((left_pt / WIDTH_PT, below_pt / height_pt, inside_pt / WIDTH_PT, body_pt / height_pt))
    axes.set_facecolor(PAPER)
    _write_head(figure, titles, list(zip(keys, labels, strict=True)), y_label)
    axes.set_xlabel("\n".join(x_labels), size=TEXT_PT, color=MUTED, labelpad=4)
    axes.tick_params(labelsize=TEXT_PT, labelcolor=INK, color=GRID, length=0, pad=6)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def _write_head(figure: Figure, titles: list[str], keys: list[tuple[Key, list[str]]], y_label: str) -> None:
    """Write the title, the key and what the y axis shows, a line each from the top."""
    from matplotlib.lines import Line2D

    height_pt = figure.get_figheight() * _POINTS_PER_INCH
    down_pt = MARGIN_PT + LINE_PT / 2

    def write(text: str, *, x_pt: float = MARGIN_PT, **style: Any) -> None:
        nonlocal down_pt
        look: dict[str, Any] = {"size": TEXT_PT, "color": INK} | style
        x, y = x_pt / WIDTH_PT, 1 - down_pt / height_pt
        figure.text(x, y, text, va="center_baseline", parse_math=False, **look)
        down_pt += LINE_PT

    for line in titles:
        write(line, size=_TITLE_PT, weight="bold")
    for key, lines in keys:
        x, y = (MARGIN_PT + 7) / WIDTH_PT, 1 - down_pt / height_pt
        width = 3.0 if key.marker == "|" else 1.0
        figure.add_artist(Line2D([x], [y], marker=key.marker, color=key.colour, markersize=10, markeredgewidth=width))
        for line in lines:
            write(line, x_pt=MARGIN_PT + _MARK_PT)
    if y_label:
        write(y_label, color=MUTED)


def write_png(chart: Chart, path: Path) -> None:
    """Write a plot in its light colours; as a picture stands alone, what it shows stands above the title."""
    from matplotlib.transforms import Bbox

    figure = chart.figure
    width, height = figure.get_size_inches()
    lines = wrapped(chart.where, WIDTH_PT - 2 * MARGIN_PT)
    above = (LINE_PT * len(lines) + MARGIN_PT * bool(lines)) / _POINTS_PER_INCH
    texts = []
    for i, line in enumerate(lines):
        y = 1 + (above - (MARGIN_PT + LINE_PT * (i + 0.5)) / _POINTS_PER_INCH) / height
        look: dict[str, Any] = {"size": TEXT_PT, "color": MUTED, "va": "center_baseline", "parse_math": False}
        texts.append(figure.text(MARGIN_PT / WIDTH_PT, y, line, **look))
    box = Bbox.from_bounds(0, 0, width, height + above)
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None}, bbox_inches=box)
    for text in texts:
        text.remove()


def as_svg(chart: Chart, prefix: str) -> str:
    """Return a plot as an element to stand in a page: its colours are the page's, its text is text.

    Args:
        prefix: of all ids in it; every plot of a page needs its own.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "card"}):  # ids that do not change from run to run
        chart.figure.savefig(file, format="svg", metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<style[^>]*>.*?</style>", "", svg, count=1, flags=re.DOTALL)  # would speak for the whole page
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", _FONTS, svg)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    title = f"{chart.title}, {chart.where}" if chart.where else chart.title
    alt = escape(f"{title}: {chart.alt}").replace("\\", "/")
    label = f'role="img" aria-label="{alt}"'
    return re.sub(r'<svg (.*?)width="[^"]*" height="[^"]*"', rf"<svg {label} \g<1>", svg, count=1, flags=re.DOTALL)
