"""Speculation for time series: a small forecaster proposes patches of values, a large one accepts or replaces them."""

from card.series.data import read_series
from card.series.forecaster import Forecast, forecast, load_forecaster, save_forecaster
from card.series.training import TrainSettings, train_forecaster
from card.series.transformer import SHAPES, Shape

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
