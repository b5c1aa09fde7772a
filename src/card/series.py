"""Forecasts of time series, speculated: the public door of `card.labs.series`."""

from typing import TYPE_CHECKING

from card.machine.doors import door

if TYPE_CHECKING:
    from card.labs.series.data import read_series
    from card.labs.series.forecaster import Forecast, forecast, load_forecaster, save_forecaster
    from card.labs.series.train_forecaster import TrainSettings, train_forecaster
    from card.labs.series.transformer import SHAPES, Shape

__all__ = [
    "SHAPES",
    "Forecast",
    "Shape",
    "TrainSettings",
    "forecast",
    "load_forecaster",
    "read_series",
    "save_forecaster",
    "train_forecaster",
]

if not TYPE_CHECKING:
    _MODULES = (
        "card.labs.series.data",
        "card.labs.series.forecaster",
        "card.labs.series.train_forecaster",
        "card.labs.series.transformer",
    )
    __getattr__, __dir__ = door(__name__, __all__, _MODULES, needs=("torch", "transformers"), extra="torch")
