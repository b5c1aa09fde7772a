"""What the adapter earns around ONNX Runtime GenAI's engine, on the same cores in total.

Plain decoding computes on all cores. With a draft model the engine computes on all but the last one, which is the
drafter's. All rows run in turn, repeat by repeat; only ratios within one run count. The model is the one of the tests:
its paged attention of stock operators is slow, so that these are figures of the adapter and not of ONNX Runtime.

    make test-onnx                                       # sets up .venv-onnx
    PYTHONPATH=. .venv-onnx/bin/python benchmarks/onnx_genai.py --out benchmarks/results/onnx_genai_90M.jsonl
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import options
from table import markdown

from card.models.inflation import inflate, parse_parameter_count
from card.models.loading import load_model, load_tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets
from tests.inside.onnx.paged import export_paged
from tests.inside.onnx.running import Decoded, decode, load_engine_model

BENCHMARK = "onnx_genai"


def export(cost: str, folder: Path) -> Path:
    """Return the folder of the built-in target at a price, made if it is not there."""
    place = folder / cost
    if not (place / "tokenizer.json").is_file():
        export_paged(inflate(load_model("demo-target").float(), parse_parameter_count(cost)), place)
        load_tokenizer("demo-target").save_pretrained(place)
    return place


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one line for each row and concurrency."""
    folder = export(args.target_cost, args.models)
    cores = sorted(os.sched_getaffinity(0))
    rows: dict[str, tuple[dict[str, Any] | None, list[int]]] = {
        "plain": (None, cores),
        "card": ({"draft": "demo-draft", "draft_cores": [cores[-1]]}, cores[:-1]),
        "card, no draft model": ({}, cores),
    }
    models = {name: load_engine_model(folder, len(own)) for name, (_, own) in rows.items()}
    (dataset,) = read_datasets([parse_spec(args.prompts)], limit=args.limit)
    tokenizer = load_tokenizer("demo-target")
    prompts = [question.encode(tokenizer) for question in dataset.questions]
    lines: list[dict[str, Any]] = []
    for at_once in options.numbers(args.concurrency):
        runs: dict[str, list[Decoded]] = {name: [] for name in rows}
        for repeat in range(args.repeats):
            for name in rows if repeat % 2 == 0 else reversed(rows):
                card, own = rows[name]
                os.sched_setaffinity(0, own)
                new = decode(models[name], folder, prompts, max_tokens=args.max_tokens, at_once=at_once, card=card)
                os.sched_setaffinity(0, cores)
                runs[name].append(new)
        for name, timed in runs.items():
            rates = [sum(map(len, one.texts)) / one.wall_s for one in timed]
            lines.append(
                {
                    "benchmark": BENCHMARK,
                    "row": name,
                    "at_once": at_once,
                    "target": args.target_cost,
                    "prompts": args.prompts,
                    "num_prompts": len(prompts),
                    "max_tokens": args.max_tokens,
                    "tokens_per_s": rates,
                    "ratios": [alone.wall_s / one.wall_s for alone, one in zip(runs["plain"], timed, strict=True)],
                    "tokens_per_run": sum(map(len, timed[0].texts)) / timed[0].num_runs,
                    "texts_apart": sum(a != b for a, b in zip(timed[0].texts, runs["plain"][0].texts, strict=True)),
                }
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-cost", default="90M", help="price of the built-in target (default: %(default)s)")
    parser.add_argument("--prompts", default="questions", help="as --data of card bench (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--limit", type=int, default=4, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("build/onnx"), help="folder for the exported target")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/onnx_genai.jsonl"))
    args = parser.parse_args(argv)
    facts = options.describe_run()
    lines = measure(args)
    options.append_lines(args.out, [{**line, **facts} for line in lines])
    table = [
        [
            str(line["at_once"]),
            line["row"],
            f"{statistics.median(line['tokens_per_s']):.0f}",
            f"{statistics.median(line['ratios']):.2f} ({min(line['ratios']):.2f}–{max(line['ratios']):.2f})",
            f"{line['tokens_per_run'] / line['at_once']:.2f}",
            f"{line['texts_apart']} of {line['num_prompts']}",
        ]
        for line in lines
    ]
    print(markdown(["at once", "row", "tokens/s", "/ plain", "tokens a run", "texts apart"], table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
