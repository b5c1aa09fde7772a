"""Forecasts of time series, speculated: the public door of `card.labs.series`."""

from card.labs.series import *  # noqa: F403
