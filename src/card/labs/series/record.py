"""Commands that forecast time series."""

from card.config.record import Command, Record

RECORD = Record(
    commands=(
        Command("forecast", "Forecast a time series.", "card.labs.series.options:forecast", "torch"),
        Command(
            "train forecaster", "Train a forecaster of time series.", "card.labs.series.options:forecaster", "torch"
        ),
    )
)
