"""How does the size of the draft model matter: a larger one agrees more, and makes fewer layers in a target pass?

    python benchmarks/paper/draft_size.py measure --draft demo-draft --data gsm8k=FILE --out FILE.jsonl
    python benchmarks/paper/draft_size.py simulate --out FILE.jsonl

``measure`` counts what each draft model's agreement is worth, with the same number of layers for all. Speed is measured
by `card bench`, see the README. ``simulate`` asks how fast drafts of 1B and 8B make a target of 70B, with published
latencies, over their agreement: that of the 8B one is not published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loop import LAYERS_PER_ROUND, LoopSettings
from made_up import FITTED, make_recording
from pairs import Costs, RealPair, ReplayedPair
from published import SCRIPT_WIDTHS
from results import add_measuring_options, append_line, loop_facts, run_facts
from width import TARGET

from card.errors import CardError
from card.planner.profile import load_profile

PROFILES = ("llama-3.2-1b-h100", "llama-3.1-8b-h100")
AGREEMENTS = (0.7, 0.8, 0.85, 0.9, 0.94, 0.97)
DEFAULT_WIDTH = 45


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each draft model and workload. Raises: CardError."""
    torch.set_num_threads(args.threads)
    facts = run_facts()
    settings = LoopSettings(beam_width=args.width, layers_per_round=args.layers)
    for draft in args.draft or ["demo-draft", "demo-target"]:
        pair = RealPair(args.target, draft, dtype=args.dtype, draft_dtype=args.draft_dtype)
        data = args.data or ["questions", "code"]
        for workload in pair.workloads(data, skip=args.skip, limit=args.limit, max_tokens=args.max_tokens):
            counts = pair.count(settings, workload.prompts, args.max_tokens)
            yield {
                "kind": "draft-size",
                "basis": "measured",
                **pair.facts(),
                **workload.facts(),
                "max_tokens": args.max_tokens,
                **loop_facts(settings, counts),
                **facts,
            }


def simulate(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each draft model and agreement. Raises: CardError."""
    target = load_profile(TARGET)
    facts = run_facts()
    for profile_name in PROFILES:
        draft = load_profile(profile_name)
        width, layers = SCRIPT_WIDTHS[draft.name]
        settings = LoopSettings(beam_width=args.width or width, layers_per_round=layers)
        costs = Costs.of(f"{draft.name} -> {target.name}", target, draft, keeps_books=False)
        for agreement in args.agreements:
            behaviour = replace(FITTED["gsm8k"], agreement=agreement)
            pair = ReplayedPair(make_recording(behaviour, num_texts=args.limit))
            (timed,) = pair.run(settings, [costs])
            yield {
                "kind": "draft-size",
                "basis": "simulated",
                **pair.facts(costs),
                "workload": "made up",
                "draft": draft.name,
                "draft_parameters": draft.num_parameters,
                "target_parameters": target.num_parameters,
                "agreement": agreement,
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
    measuring.add_argument("--draft", action="append", help="folder or name (default: demo-draft, and the target)")
    measuring.add_argument("--width", type=int, default=DEFAULT_WIDTH, help="K (default: %(default)s)")
    measuring.add_argument(
        "--layers", type=int, default=LAYERS_PER_ROUND, help="per target pass (default: %(default)s)"
    )
    simulating.add_argument("--limit", type=int, default=8, help="texts of a made-up pair (default: %(default)s)")
    simulating.add_argument("--width", type=int, help="K (default: that of CARD's scripts for each draft)")
    simulating.add_argument(
        "--agreements", type=_numbers, default=AGREEMENTS, help="such as 0.8,0.9 (default: 0.7 to 0.97)"
    )
    for one in (measuring, simulating):
        one.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args(argv)
    try:
        for line in (measure if args.kind == "measure" else simulate)(args):
            append_line(args.out, line)
            speed = f", {line['speed_up']:.2f} times plain decoding" if "speed_up" in line else ""
            print(
                f"{line['draft']}, {line['workload']}: {line['tokens_per_pass']:.2f} tokens a target pass{speed}",
                flush=True,
            )
    except CardError as error:
        print(f"draft_size.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
