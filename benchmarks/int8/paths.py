"""What does a pass cost on each path that can run a model on a CPU, in seconds of one processor?

The exact pass and transformers' modules, in turns on one thread, for passes of several sizes behind a text: the median
of the processor's milliseconds. So other work on the machine counts for little.

    python benchmarks/int8/paths.py --model demo-target --cost 90M --out benchmarks/results/paths.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import options
import torch

from card.backends.transformers.loading import load_model
from card.config import parse_parameter_count
from card.models.inflation import inflate
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner

_ROWS, _PROMPT = (1, 8, 16), 512
_PREFIX = 64  # rows of text before a pass
_PATHS = ("exact", "modules")


def make_runner(args: argparse.Namespace, dtype: torch.dtype, path: str) -> RowRunner:
    """Return a runner of a model of its own that takes this path."""
    model = load_model(args.model, dtype="float64")
    if args.cost:
        model = inflate(model, parse_parameter_count(args.cost))
    model = model.to(dtype)
    return plain_runner(model, max_model_len=1024, max_tree_rows=64, own_pass=path == "exact")


def processor_ms(runner: RowRunner, slot: int, rows: int, held: int) -> float:
    """Return the processor's milliseconds of a pass of so many rows behind those that a sequence holds."""
    extension = Extension(slot, [7] * rows, range(held - 1, held - 1 + rows), rows - 1 if rows == _PROMPT else 0)
    started = time.process_time()
    runner.forward([extension])
    taken = 1e3 * (time.process_time() - started)
    runner.keep(slot, held)
    return taken


def main() -> None:
    """Measure and print, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-target")
    parser.add_argument("--cost", help="inflate it to so many parameters")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, object]] = []
    for name in args.dtypes:
        runners = {path: make_runner(args, getattr(torch, name), path) for path in _PATHS}
        slots = {path: runner.open() for path, runner in runners.items()}
        for path, runner in runners.items():
            runner.forward([Extension(slots[path], [5] * _PREFIX, range(-1, _PREFIX - 1))])
        found: dict[int, dict[str, float]] = {}
        for rows in (*_ROWS, _PROMPT):
            runs = args.runs if rows != _PROMPT else max(3, args.runs // 5)
            taken = {path: [] for path in _PATHS}
            for _ in range(runs + 1):
                for path, runner in runners.items():
                    taken[path].append(processor_ms(runner, slots[path], rows, _PREFIX))
            found[rows] = {path: round(statistics.median(of[1:]), 3) for path, of in taken.items()}
            print(name, rows, found[rows], flush=True)
        about = {"model": Path(args.model).name, "cost": args.cost, "dtype": name, "threads": 1, "prefix_rows": _PREFIX}
        lines.append({"benchmark": "paths", **about, "processor_ms": found, **options.describe_run()})
    if args.out:
        options.append_lines(args.out, lines)


if __name__ == "__main__":
    main()
