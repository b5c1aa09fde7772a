"""`card forecast` and `card train forecaster`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from card.cli.parts.files import check_can_write
from card.cli.parts.starting import load
from card.cli.parts.tables import progress_bar, table
from card.errors import SettingsError
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.driver import say, stepping
from card.labs.series.data import read_series
from card.labs.series.decoding import PatchModel
from card.labs.series.forecaster import Forecast, forecast, load_forecaster, model_type, save_forecaster
from card.labs.series.plot import draw
from card.labs.series.train_forecaster import TrainSettings, train_forecaster
from card.labs.series.transformer import SHAPES

_CHECKPOINT = "training.pt"
_LOW, _HIGH = 0.1, 0.9  # quantiles that are printed


def run_forecast(
    *,
    series: Path,
    column: str | None,
    target: Path,
    draft: Path | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run `card forecast`. Raises: CardError of any kind."""
    values = read_series(series, column)
    models = _open(target), _open(draft) if draft else None
    made = forecast(values, options.pop("horizon"), *models, **options)
    if plot is not None:
        draw(made, values, plot)
    if as_json:
        click.echo(json.dumps(_facts(made)))
    else:
        _print(Console(), made, plot)


def _open(folder: Path) -> PatchModel:
    """Read a forecaster; transformers is imported only for its own models."""
    if model_type(folder) is None:
        return load_forecaster(folder)
    opened: PatchModel = load("card.labs.series.loading", "importing transformers").open_forecaster(folder)
    return opened


def _facts(made: Forecast) -> dict[str, Any]:
    rows = {"mean": made.mean, "low": made.quantile(_LOW), "median": made.quantile(0.5), "high": made.quantile(_HIGH)}
    counts = asdict(made.stats)
    rates = {"patches_per_round": made.stats.patches_per_round, "acceptance_rate": made.stats.acceptance_rate}
    return {"exact": made.exact, **{name: row.tolist() for name, row in rows.items()}, "stats": counts | rates}


def _print(console: Console, made: Forecast, plot: Path | None) -> None:
    shown = table("step", numbers=("mean", "10 %", "median", "90 %"))
    rows = made.mean, made.quantile(_LOW), made.quantile(0.5), made.quantile(_HIGH)
    for step, row in enumerate(zip(*rows, strict=True), 1):
        shown.add_row(str(step), *(f"{value:.4g}" for value in row))
    console.print(shown)
    stats = made.stats
    console.print(
        f"{len(made.samples)} continuations with the target's own law"
        if made.exact
        else f"{len(made.samples)} continuations with another law than the target's (exact: false)"
    )
    gain = f"{stats.patches_per_round:.2f} patches of a continuation in each"
    words = f"passes of the target: {stats.num_target_passes}, {gain}"
    console.print(words + (f", {stats.acceptance_rate:.0%} of proposals accepted" if stats.num_checked else ""))
    if plot is not None:
        console.print(f"drawn in {plot}", soft_wrap=True)


def run_training(*, series: Path, columns: tuple[str, ...], out: Path, size: str, **options: Any) -> None:
    """Run `card train forecaster`. Raises: CardError of any kind."""
    if out.exists() and any(path.name != _CHECKPOINT for path in out.iterdir()):
        raise SettingsError(f"{out} is not empty; name another folder, or remove it first")
    check_can_write(out / "config.json")
    read = [read_series(series, column) for column in columns]
    settings, checkpoint = TrainSettings(**options), Checkpoint(out / _CHECKPOINT, {})
    out.mkdir(parents=True, exist_ok=True)
    with progress_bar() as progress:
        on_step = stepping(progress, total=settings.steps)
        trained = train_forecaster(read, SHAPES[size], settings, checkpoint=checkpoint, on_step=on_step)
    save_forecaster(trained.model, out)
    checkpoint.delete()
    say(
        f"{sum(weight.numel() for weight in trained.model.parameters()):,} parameters, {trained.held_out_loss:.4f} nats"
        f" a value on the newest tenth, which was not learnt from; written to {out}"
    )
