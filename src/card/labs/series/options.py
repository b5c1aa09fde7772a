"""The options of the commands about time series: forecast, and train forecaster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from card.cli.parts.command import command
from card.cli.parts.files import NamedPath, OutputPath
from card.cli.parts.options import counted, file_option
from card.cli.parts.starting import run

_MODES = ("exact", "redraw", "averaged", "adaptive", "tolerance")  # of card.labs.series.verify, which imports torch

_FOLDER = NamedPath(file_okay=False, path_type=Path)

F = TypeVar("F", bound=Callable[..., Any])


def _folder(flag: str, *, kind: click.Path = _FOLDER, required: bool = False, words: str) -> Callable[[F], F]:
    return click.option(flag, required=required, type=kind, metavar="DIR", help=words)


@command(short_help="Forecast a time series.")
@file_option("--series", required=True, words="CSV file with a header.")
@click.option("--column", help="Its values.  [default: the only numbers]")
@counted("--horizon", default=96, words="Values to forecast.")
@_folder("--target", required=True, words="Forecaster whose law counts.")
@_folder("--draft", words="Forecaster that proposes.")
@counted("--num-samples", default=100, least=2, words="Continuations to draw.")
@counted("--num-speculative-patches", default=3, words="Patches proposed ahead.")
@click.option("--mode", type=click.Choice(_MODES), default="exact", show_default=True, help="Rule of acceptance.")
@counted("--seed", default=0, least=0, words="Draws.")
@click.option("--plot", type=OutputPath(), help="Write a PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def forecast(**options: Any) -> int:
    """Forecast a series: the draft proposes, the target verifies."""
    return run("card.labs.series.command.run_forecast", **options)


@command("forecaster", short_help="Train a forecaster of time series.")
@file_option("--series", required=True, words="CSV file.")
@click.option("--column", "columns", multiple=True, required=True, help="Values to learn.")
@_folder("--out", kind=OutputPath(is_folder=True), required=True, words="Folder to write.")
@click.option(
    "--size", type=click.Choice(("large", "small")), default="large", show_default=True, help="Target, draft."
)
@counted("--steps", default=1000, words="Batches of windows.")
@counted("--seed", default=0, least=0, words="Weights, windows.")
def forecaster(**options: Any) -> int:
    """Train a forecaster for card forecast. The same command resumes a training that was cut off."""
    return run("card.labs.series.command.run_training", **options)
