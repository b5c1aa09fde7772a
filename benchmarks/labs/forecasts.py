"""What does speculation save a forecaster? Passes, rows, Python's calls and processor time for 1, 8, 50 continuations.

`series` takes trained forecasters and real series, with the exact rule. `shape` takes a target as dear as a foundation
model, of TimesFM 2.0's width and with random weights, and accepts by coins, with chances that STRIDE's own logs show;
with no layers it costs nothing, and calls of functions outside of passes are counted. A row is one patch of one
continuation in one pass. A model without a cache (TimesFM) reads all patches of a continuation again in each pass:
those are its rows.

    python benchmarks/labs/forecasts.py series --target target --draft draft --series ETTh1.csv:OT --series ETTh2.csv:OT
    python benchmarks/labs/forecasts.py shape --layers 20
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import click
import torch
from options import append_lines, describe_run, numbers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from card.labs.series.data import read_series
from card.labs.series.decoding import ForecastPair, PatchModel, Paths, sample_paths
from card.labs.series.forecaster import load_forecaster
from card.labs.series.laws import Gaussian
from card.labs.series.transformer import PatchTransformer, Shape
from card.labs.series.verify import AcceptanceRule, find_rule, redraw

CONTEXT, AHEAD, HORIZON = 16, 3, 12  # patches; the former two as in STRIDE's runs
PUBLISHED = (0.79, 0.96, 0.9996)  # acceptance in STRIDE's logs of ETTh1
WIDTH, HEADS, LAYERS = (
    1280,
    16,
    20,
)  # TimesFM 2.0's; its 50 layers have narrow MLPs, so ours are fewer: 394 M parameters
DRAFT_SHARE = 4  # the published draft has a quarter of the target's width


@dataclass(slots=True)
class Counts:
    """What a model did."""

    passes: int = 0
    rows: int = 0  # new patches that passes read, over all continuations
    rows_without_cache: int = 0  # patches that they read if each pass begins at the first one
    cpu_s: float = 0.0  # of the process, inside its passes


@dataclass(slots=True)
class Calls:
    """Calls of functions, Python's and C's, outside of passes."""

    num: int = 0
    are_inside: bool = False

    def see(self, _: FrameType, event: str, __: Any) -> None:
        """Count one event of sys.setprofile."""
        self.num += event in ("call", "c_call") and not self.are_inside


@dataclass(slots=True)
class CountedPaths:
    """Paths whose passes are counted."""

    paths: Paths
    counts: Counts
    calls: Calls

    def extend(self, patches: Tensor, starts: Tensor) -> Gaussian:
        """Read patches; count them."""
        self.calls.are_inside = True
        self.counts.passes += 1
        self.counts.rows += patches.shape[0] * patches.shape[1]
        self.counts.rows_without_cache += int((starts + patches.shape[1]).sum())
        started = time.process_time()
        found = self.paths.extend(patches, starts)
        self.counts.cpu_s += time.process_time() - started
        self.calls.are_inside = False
        return found

    def keep(self, rows: Tensor) -> None:
        """Keep some paths."""
        self.paths.keep(rows)


@dataclass(slots=True)
class Counted:
    """A model whose passes are counted."""

    model: PatchModel
    calls: Calls = field(default_factory=Calls)
    counts: Counts = field(default_factory=Counts)

    @property
    def patch_size(self) -> int:
        """Values in a patch."""
        return self.model.patch_size

    @property
    def max_patches(self) -> int:
        """Context and forecast together."""
        return self.model.max_patches

    def open(self, context: Tensor, num_paths: int, num_patches: int) -> CountedPaths:
        """Begin paths."""
        return CountedPaths(self.model.open(context, num_paths, num_patches), self.counts, self.calls)


class Free:
    """A model that costs nothing and knows nothing: standard normal values."""

    patch_size, max_patches = 8, 64

    def open(self, context: Tensor, num_paths: int, num_patches: int) -> Free:
        """Begin paths."""
        return self

    def extend(self, patches: Tensor, starts: Tensor) -> Gaussian:
        """Return the law."""
        return Gaussian(torch.zeros_like(patches), torch.ones_like(patches))

    def keep(self, rows: Tensor) -> None:
        """Keep some paths."""


def by_coins(chance: float) -> AcceptanceRule[Gaussian]:
    """Return a rule that accepts with one chance, whatever the laws say."""

    def ratio(target: Gaussian, draft: Gaussian, proposals: Tensor) -> Tensor:
        return torch.full(proposals.shape[:2], chance).log()

    return AcceptanceRule(ratio, redraw, is_exact=False)


def run(
    models: Sequence[PatchModel],
    rule: AcceptanceRule[Gaussian],
    context: Tensor,
    count: int,
    *,
    counts_calls: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Draw continuations with a target, and perhaps a draft; return the counts."""
    calls = Calls()
    target, *drafts = (Counted(model, calls) for model in models)
    pair = ForecastPair(target, drafts[0] if drafts else None, rule, AHEAD)
    if counts_calls:
        sys.setprofile(calls.see)
    started = time.process_time()
    try:
        _, stats = sample_paths(pair, context, HORIZON, count, torch.Generator().manual_seed(seed))
    finally:
        sys.setprofile(None)
    whole_s = 0.0 if counts_calls else time.process_time() - started
    each = {"target": asdict(target.counts), "draft": asdict(drafts[0].counts) if drafts else None}
    for one in filter(None, each.values()):
        one["cpu_s"] = round(one["cpu_s"], 3)
    rates = {"acceptance": round(stats.acceptance_rate, 4), "patches_per_round": round(stats.patches_per_round, 3)}
    return {"continuations": count, "patches": stats.num_patches, **each, **rates, "calls": calls.num, "cpu_s": whole_s}


@click.group(help=__doc__)
def main() -> None:
    """Group the two questions."""


@main.command()
@click.option("--target", required=True, type=Path, help="Folder of card train forecaster.")
@click.option("--draft", required=True, type=Path, help="Folder of a smaller one.")
@click.option("--series", "named", multiple=True, required=True, help="FILE:COLUMN; several.")
@click.option("--windows", default=8, show_default=True, help="Forecasts of a series, evenly over its newest third.")
@click.option("--continuations", default="1,8,50", show_default=True)
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def series(
    target: Path, draft: Path, named: tuple[str, ...], windows: int, continuations: str, out: Path | None
) -> None:
    """Count with trained forecasters, on real series and with the exact rule."""
    models = load_forecaster(target), load_forecaster(draft)

    def lines() -> Iterator[dict[str, Any]]:
        for name in named:
            path, _, column = name.rpartition(":")
            for count in numbers(continuations):
                contexts = list(_contexts(Path(path), column, windows, models[0].patch_size))
                for used in (models[:1], models):
                    runs = [run(used, find_rule("exact"), one, count, counts_calls=False) for one in contexts]
                    facts = {
                        "benchmark": "forecasts",
                        "question": "series",
                        "series": Path(path).name,
                        "column": column,
                    }
                    yield {**facts, "forecasts": len(runs), **_joined(runs), **describe_run()}

    _show(lines(), ("series", "column"), out)


@main.command()
@click.option(
    "--layers", default=LAYERS, show_default=True, help="Of the target; 0: none of the models costs anything."
)
@click.option("--acceptance", "chances", default=PUBLISHED, multiple=True, type=float, show_default=True)
@click.option("--continuations", default="1,8,50", show_default=True)
@click.option("--seeds", default=20, show_default=True, help="Forecasts that are added up.")
@click.option("--out", type=Path, help="JSON lines are appended to it.")
def shape(layers: int, chances: tuple[float, ...], continuations: str, seeds: int, out: Path | None) -> None:
    """Count with a target as dear as a foundation model, accepting by coins; count calls, too, if nothing costs."""
    torch.manual_seed(0)
    models: list[PatchModel] = [Free(), Free()]
    if layers:
        small = Shape(
            width=WIDTH // DRAFT_SHARE, num_heads=HEADS // DRAFT_SHARE, num_layers=max(1, layers // DRAFT_SHARE)
        )
        whole = Shape(width=WIDTH, num_heads=HEADS, num_layers=layers)
        models = [PatchTransformer(one).train(False) for one in (whole, small)]
    sizes = [sum(one.numel() for one in model.parameters()) if layers else 0 for model in models]  # type: ignore[attr-defined]
    context = torch.randn(CONTEXT, 8, generator=torch.Generator().manual_seed(0))

    def lines() -> Iterator[dict[str, Any]]:
        for count in numbers(continuations):
            for chance in (0.0, *chances):
                used = models if chance else models[:1]
                rule, calls = by_coins(chance), not layers
                made = _joined([run(used, rule, context, count, counts_calls=calls, seed=one) for one in range(seeds)])
                facts = {
                    "benchmark": "forecasts",
                    "question": "shape",
                    "parameters": sizes,
                    "forced": chance,
                    "forecasts": seeds,
                }
                yield {**facts, **made, **describe_run()}

    _show(lines(), ("forced",), out)


def _contexts(path: Path, column: str, windows: int, size: int) -> Iterator[Tensor]:
    """Yield normalised contexts [N, P] of a series, evenly over its newest third."""
    values, length = read_series(path, column), CONTEXT * size
    last = len(values) - HORIZON * size
    first = max(length, len(values) - len(values) // 3)
    for i in range(windows):
        end = first + (last - first) * i // max(windows - 1, 1)
        read = torch.as_tensor(values[end - length : end])
        if read.std() > 0:
            yield ((read - read.mean()) / read.std(unbiased=False)).float().view(-1, size)


def _joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of several forecasts added up, and their mean rates."""
    joined: dict[str, Any] = {"continuations": runs[0]["continuations"]}
    for name in ("target", "draft"):
        several = [one[name] for one in runs if one[name]]
        joined[name] = {key: round(sum(one[key] for one in several), 3) for key in several[0]} if several else None
    for name in ("patches", "calls", "cpu_s"):
        joined[name] = round(sum(one[name] for one in runs), 3)
    return joined | {
        name: round(sum(one[name] for one in runs) / len(runs), 4) for name in ("acceptance", "patches_per_round")
    }


def _show(lines: Iterator[dict[str, Any]], names: Sequence[str], out: Path | None) -> None:
    table = Table(
        *names, "continuations", "accepted", "target passes", "rows", "uncached rows", "draft passes", "calls", "cpu s"
    )
    for line in lines:
        target, draft = line["target"], line["draft"] or {"passes": 0}
        cells = [
            line["continuations"],
            line["acceptance"],
            target["passes"],
            target["rows"],
            target["rows_without_cache"],
        ]
        table.add_row(
            *(str(line[one]) for one in names),
            *map(str, [*cells, draft["passes"], line.get("calls"), line.get("cpu_s")]),
        )
        if out is not None:
            append_lines(out, [line])
    Console().print(table)


if __name__ == "__main__":
    main()
