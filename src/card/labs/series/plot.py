"""Plot a forecast: the newest values, the median, and two bands (matplotlib, extra `bench`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from card.cli.parts.files import writing
from card.errors import SettingsError
from card.labs.series.data import Values
from card.machine.packages import install_command

if TYPE_CHECKING:
    from card.labs.series.forecaster import Forecast

_SEEN, _FORECAST = "#333333", "#0072B2"  # distinct for colour-blind readers, too
_SHOWN_BEFORE = 2  # horizons of known values


def draw(made: Forecast, values: Values, path: Path) -> None:
    """Write a PNG; its folder is made if needed.

    Args:
        values: [T], the series that was continued.
    Raises: SettingsError if matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SettingsError(
            f"a plot needs matplotlib, which is not installed; run {install_command('bench')}"
        ) from None
    horizon = made.samples.shape[1]
    seen = values[-_SHOWN_BEFORE * horizon :]
    steps = np.arange(1, horizon + 1)
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(-len(seen) + 1, 1), seen, color=_SEEN, label="series", linewidth=1.2)
    for low, high, shade in ((0.05, 0.95, 0.18), (0.25, 0.75, 0.32)):
        bounds = made.quantile(low), made.quantile(high)
        axes.fill_between(
            steps, *bounds, color=_FORECAST, alpha=shade, linewidth=0, label=f"{high - low:.0%} of forecasts"
        )
    axes.plot(steps, made.quantile(0.5), color=_FORECAST, label="median forecast", linewidth=1.6)
    axes.axvline(0.5, color="#999999", linewidth=0.8)
    axes.set_xlabel("steps from the end of the series")
    axes.legend(loc="upper left", fontsize=8, ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with writing(path) as place:
        FigureCanvasAgg(figure).print_figure(place, dpi=150, format="png")
