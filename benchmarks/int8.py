"""What do integer passes cost, and what do they change?

Passes: milliseconds of one pass by rows, in integers and in the stored dtype, in turn, the shortest of several runs.
Quality: perplexity of texts under both, and how often both find the same token likeliest.

    python benchmarks/int8.py --texts gsm8k=gsm8k_test.jsonl:question,answer --out int8.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import options
import torch

from card.models.facts import context_limit
from card.models.inflation import inflate, parse_parameter_count
from card.models.loading import load_tokenizer
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import make_runner
from card.theirs.transformers.loading import load_model
from card.tree.logits import as_array, log_softmax

_ROWS = (1, 2, 4, 8, 12, 16, 32)
_SETTLE_S = 0.005  # the other runner's threads spin for a while after its pass


def load_runner(args: argparse.Namespace, dtype: str) -> RowRunner:
    """Return a runner of the target, inflated if that was asked for."""
    model = load_model(args.target, dtype=dtype)
    if args.target_cost:
        model = inflate(model, parse_parameter_count(args.target_cost))
    return make_runner(model, max_model_len=min(args.max_tokens, context_limit(model)), max_tree_rows=64)


def measure_passes(runners: dict[str, RowRunner], runs: int, prefix_rows: int) -> dict[str, dict[int, float]]:
    """Return the shortest milliseconds of a pass behind so many rows, by runner and rows; the runners take turns."""
    slots = {}
    for name, runner in runners.items():
        slots[name] = runner.open()
        runner.forward([Extension(slots[name], [5] * prefix_rows, range(-1, prefix_rows - 1))])
    found = {name: dict.fromkeys(_ROWS, math.inf) for name in runners}
    for _ in range(runs + 1):
        for rows in _ROWS:
            for name, runner in runners.items():
                tokens, parents = [7] * rows, range(prefix_rows - 1, prefix_rows - 1 + rows)
                time.sleep(_SETTLE_S)
                for _ in range(2):
                    started = time.perf_counter()
                    runner.forward([Extension(slots[name], tokens, parents)])
                    found[name][rows] = min(found[name][rows], 1e3 * (time.perf_counter() - started))
                    runner.keep(slots[name], prefix_rows)
    for name, runner in runners.items():
        runner.close(slots[name])
    return found


def compare_texts(runners: dict[str, RowRunner], texts: Sequence[Sequence[int]]) -> dict[str, object]:
    """Return the perplexity under each runner, and the share of tokens for which all find the same one likeliest."""
    losses, num_tokens, num_agreed = dict.fromkeys(runners, 0.0), 0, 0
    for token_ids in texts:
        best = []
        for name, runner in runners.items():
            slot = runner.open()
            (logits,) = runner.forward([Extension(slot, token_ids, range(-1, len(token_ids) - 1))])
            runner.close(slot)
            logprobs = log_softmax(as_array(logits)[:-1])
            losses[name] -= float(logprobs[np.arange(len(logprobs)), token_ids[1:]].sum(dtype=np.float64))
            best.append(logprobs.argmax(1))
        num_tokens += len(token_ids) - 1
        num_agreed += int((best[0] == best[1]).sum())
    perplexities = {name: round(math.exp(loss / num_tokens), 4) for name, loss in losses.items()}
    return {"tokens": num_tokens, "perplexity": perplexities, "top1_agreement": round(num_agreed / num_tokens, 4)}


def read_texts(wanted: str, args: argparse.Namespace) -> tuple[str, list[list[int]]]:
    """Return the name and the token ids of the texts that NAME=FILE:FIELD,FIELD asks for."""
    name, _, rest = wanted.partition("=")
    file, _, fields = rest.rpartition(":")
    tokenizer, texts = load_tokenizer(args.target), []
    for line in Path(file).read_text("utf-8").splitlines()[args.skip : args.skip + args.limit]:
        record = json.loads(line)
        token_ids = tokenizer.encode("\n".join(record[field] for field in fields.split(",")))
        texts.append(token_ids[: args.max_tokens - 1])
    return name, [token_ids for token_ids in texts if len(token_ids) > 1]


def main() -> None:
    """Measure and print, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--target-cost")
    parser.add_argument("--dtype", default="auto", help="what integers are compared with [auto: as stored]")
    parser.add_argument("--texts", action="append", default=[], metavar="NAME=FILE:FIELD,FIELD")
    parser.add_argument("--skip", type=int, default=0, help="lines of each file")
    parser.add_argument("--limit", type=int, default=40, help="texts of each file")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a text")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--prefix-rows", type=int, nargs="*", default=[64], help="rows of text before the pass")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runners = {name: load_runner(args, dtype) for name, dtype in (("stored", args.dtype), ("int8", "int8"))}
    about = {
        "benchmark": "int8",
        "target": Path(args.target).name,
        "target_cost": args.target_cost,
        "stored": runners["stored"].precision,
        **options.describe_run(),
    }
    lines: list[dict[str, object]] = []
    for threads, prefix_rows in itertools.product(args.threads, args.prefix_rows):
        torch.set_num_threads(threads)
        passes = measure_passes(runners, args.runs, prefix_rows)
        lines.append({"threads": threads, "prefix_rows": prefix_rows, "pass_ms": passes, **about})
        print(f"{threads} threads behind {prefix_rows} rows of text, rows: stored / int8 in ms")
        for rows in _ROWS:
            stored, integers = (passes[name][rows] for name in ("stored", "int8"))
            print(f"{rows:4d}: {stored:7.2f} / {integers:7.2f}   {stored / integers:.2f} times as fast")
    for wanted in args.texts:
        name, texts = read_texts(wanted, args)
        found = compare_texts(runners, texts)
        lines.append({"texts": name, "num_texts": len(texts), **found, **about})
        print(name, json.dumps(found))
    if args.out:
        options.append_lines(args.out, lines)


if __name__ == "__main__":
    main()
