"""Compare speculated forecasts with plain ones and with the draft alone: counts, errors, time.

    card train forecaster ...  # src/card/labs/series/README.md tells how the models were made
    python benchmarks/series.py --series ETTh1.csv --target target --draft draft --out series.jsonl

Windows of all columns are taken from hours 11,520 to 14,400, the usual test part of ETTh1 and ETTh2, of which the
models have seen nothing. Errors are in the units of a column over its deviation in hours 0 to 8,640, as others report.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from options import append_lines, describe_run

from card.labs.series.data import Values, read_series
from card.labs.series.forecaster import forecast, load_forecaster
from card.labs.series.verify import MODES

COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
TRAIN_END, TEST_BEGIN, TEST_END = 8640, 11520, 14400


def crps(samples: Values, truth: Values) -> float:
    """Return the continuous ranked probability score, mean over the steps, in the units of the series; less is better.

    It is mean |x - y| - mean |x - x'| / 2 over pairs of different samples, so more samples do not change its mean.

    Args:
        samples: [S, T], S of 2 or more.
        truth: [T].
    Source: Gneiting and Raftery 2007, Strictly Proper Scoring Rules, Prediction, and Estimation.
    """
    num_samples = len(samples)
    ranks = 2 * np.arange(1, num_samples + 1) - num_samples - 1
    apart = (ranks[:, None] * np.sort(samples, 0)).sum(0) / (num_samples * (num_samples - 1) / 2)
    return float((np.abs(samples - truth).mean(0) - apart / 2).mean())


def squared_error(samples: Values, truth: Values) -> float:
    """Return the mean squared error of the samples' mean, in squared units of the series: [S, T] and [T]."""
    return float(np.square(samples.mean(0) - truth).mean())


def windows(path: Path, num_windows: int, horizon: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (what is known, what came) of each window, as many of each column, standardised."""
    found = []
    for column in COLUMNS:
        values = read_series(path, column)
        values = (values - values[:TRAIN_END].mean()) / values[:TRAIN_END].std()
        cuts = np.linspace(TEST_BEGIN, TEST_END - horizon, num_windows).astype(int)
        found += [(values[:cut], values[cut : cut + horizon]) for cut in cuts]
    return found


def main() -> None:
    """Measure all rows window by window, and write a JSON line for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--series", "--target", "--draft", "--out"):
        parser.add_argument(flag, type=Path, required=True)
    defaults = {"--windows": 4, "--horizon": 96, "--samples": 50, "--ahead": 3, "--threads": 1}
    for flag, default in defaults.items():
        parser.add_argument(flag, type=int, default=default)
    args, run = parser.parse_args(), describe_run()
    torch.set_num_threads(args.threads)
    target, draft = load_forecaster(args.target), load_forecaster(args.draft)
    rows = {"plain": (target, None, "exact"), "draft alone": (draft, None, "exact")}
    rows |= {"plain, other seeds": rows["plain"]} | {mode: (target, draft, mode) for mode in MODES}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for number, (known, came) in enumerate(windows(args.series, args.windows, args.horizon)):
        for place, (name, (model, helper, mode)) in enumerate(rows.items()):
            begin = time.perf_counter()
            made = forecast(
                known,
                args.horizon,
                model,
                helper,
                num_samples=args.samples,
                num_speculative_patches=args.ahead,
                mode=mode,
                seed=1000 * place + number,
            )
            wall_s, stats = time.perf_counter() - begin, made.stats
            counts = (stats.num_patches, stats.num_rounds, stats.num_checked, stats.num_accepted)
            counted = dict(zip(("patches", "rounds", "checked", "accepted"), counts, strict=True))
            scores = {"crps": crps(made.samples, came), "mse": squared_error(made.samples, came)}
            taken[name].append({**counted, **scores, "spread": float(made.samples.std(0).mean()), "wall_s": wall_s})
    settings = {name: getattr(args, name) for name in (flag[2:] for flag in defaults)}
    about = {"series": args.series.name, "draft": args.draft.name, **settings}
    lines = [{"row": name, **about, **summary(found, taken["plain"])} for name, found in taken.items()]
    for line in lines:
        print(json.dumps(line))
    append_lines(args.out, ({**line, **run} for line in lines))


def summary(found: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, float]:
    """Return means over windows, and by how much and how surely the score is off plain sampling's."""
    totals = {name: sum(one[name] for one in found) for name in ("patches", "rounds", "checked", "accepted")}
    means = {name: statistics.fmean(one[name] for one in found) for name in ("crps", "mse", "spread")}
    apart = [one["crps"] - other["crps"] for one, other in zip(found, plain, strict=True)]
    return {
        "patches_per_round": round(totals["patches"] / totals["rounds"], 4),
        "acceptance_rate": round(totals["accepted"] / max(totals["checked"], 1), 4),
        **{name: round(mean, 5) for name, mean in means.items()},
        "crps_off_plain": round(statistics.fmean(apart), 5),
        "crps_off_plain_error": round(statistics.stdev(apart) / len(apart) ** 0.5, 5),
        "wall_s": round(statistics.median(one["wall_s"] for one in found), 4),
    }


if __name__ == "__main__":
    main()
