"""How do tokens per target pass, hits and speed depend on the cache width K?

    python benchmarks/paper/width.py measure --data gsm8k=FILE --data mt-bench=FILE --out FILE.jsonl
    python benchmarks/paper/width.py simulate --out FILE.jsonl
    python benchmarks/paper/width.py simulate --target PROFILE --draft PROFILE --recording FILE --out FILE.jsonl

``measure`` runs the loop of the publication on a pair of models. What is counted there does not depend on speed.
``simulate`` runs the same loop in virtual time: on a made-up pair that was fitted to the published counts and on
published latencies, or on a recording and measured profiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from loop import LAYERS_PER_ROUND, LoopSettings
from made_up import FITTED, make_recording
from pairs import Costs, RealPair, ReplayedPair
from published import WIDTHS
from results import add_measuring_options, append_line, loop_facts, run_facts

from card.errors import CardError
from card.planner.profile import load_profile
from card.planner.recording import load_recording

TARGET, DRAFT = "llama-3.1-70b-4xh100", "llama-3.2-1b-h100"


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each workload and width. Raises: CardError."""
    torch.set_num_threads(args.threads)
    pair = RealPair(args.target, args.draft, dtype=args.dtype, draft_dtype=args.draft_dtype)
    facts = run_facts()
    data = args.data or ["questions", "code"]
    for workload in pair.workloads(data, skip=args.skip, limit=args.limit, max_tokens=args.max_tokens):
        for width in args.widths:
            settings = LoopSettings(beam_width=width, layers_per_round=args.layers)
            counts = pair.count(settings, workload.prompts, args.max_tokens)
            yield {
                "kind": "width",
                "basis": "measured",
                **pair.facts(),
                **workload.facts(),
                "max_tokens": args.max_tokens,
                **loop_facts(settings, counts),
                **facts,
            }


def simulate(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each workload, width and with and without the time around passes. Raises: CardError."""
    target, draft = load_profile(args.target), load_profile(args.draft)
    recordings = {name: make_recording(behaviour, num_texts=args.limit) for name, behaviour in FITTED.items()}
    if args.recording is not None:
        recordings = {args.workload: load_recording(args.recording)}
    name = f"{draft.name} -> {target.name}{f' at the price of {target.cost_of}' if target.cost_of else ''}"
    costs = [Costs.of(name, target, draft, keeps_books=keeps_books) for keeps_books in (False, True)]
    facts = run_facts()
    for workload, recording in recordings.items():
        pair = ReplayedPair(recording)
        for width in args.widths:
            settings = LoopSettings(beam_width=width, layers_per_round=args.layers)
            for one, timed in zip(costs, pair.run(settings, costs), strict=True):
                yield {
                    "kind": "width",
                    "basis": "simulated",
                    **pair.facts(one),
                    "workload": workload,
                    "drafter_pass_ms": round(1e3 * one.drafter_s(width, 128), 4),
                    "speed_up": round(timed.speed_up, 4),
                    **loop_facts(settings, timed.counts),
                    **facts,
                }


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    measuring, simulating = kinds.add_parser("measure"), kinds.add_parser("simulate")
    add_measuring_options(measuring)
    measuring.add_argument("--draft", default="demo-draft", help="folder or name (default: %(default)s)")
    simulating.add_argument("--target", default=TARGET, help="profile: a file or a shipped one (default: %(default)s)")
    simulating.add_argument("--draft", default=DRAFT, help="the same (default: %(default)s)")
    simulating.add_argument("--recording", type=Path, help="file of `card record` instead of made-up pairs")
    simulating.add_argument("--workload", default="gsm8k", help="what was recorded (default: %(default)s)")
    simulating.add_argument("--limit", type=int, default=8, help="texts of a made-up pair (default: %(default)s)")
    for one in (measuring, simulating):
        one.add_argument("--widths", type=_numbers, default=WIDTHS, help="K, such as 5,25 (default: as published)")
        one.add_argument("--layers", type=int, default=LAYERS_PER_ROUND, help="per target pass (default: %(default)s)")
        one.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args(argv)
    try:
        for line in (measure if args.kind == "measure" else simulate)(args):
            append_line(args.out, line)
            speed = f", {line['speed_up']:.2f} times plain decoding" if "speed_up" in line else ""
            print(
                f"{line['workload']}, K = {line['beam_width']}: {line['tokens_per_pass']:.2f} tokens a target pass, "
                f"hits {line['hit_rate']:.3f}{speed}",
                flush=True,
            )
    except CardError as error:
        print(f"width.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
