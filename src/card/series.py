"""Forecasts of time series, speculated: the public door of `card.labs.series`."""

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
