"""What do the parts of the method earn: the re-rooting of the cache, its secondary tier, its width?

    python benchmarks/paper/ablation.py measure --data gsm8k=FILE --out FILE.jsonl
    python benchmarks/paper/ablation.py simulate --out FILE.jsonl

The parts are taken out around the library's own writer and worker, see `loop`; ``measure`` counts on a pair of models,
``simulate`` on the made-up pairs, with published latencies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from loop import LAYERS_PER_ROUND, LoopSettings, Variant
from made_up import FITTED, make_recording
from pairs import Costs, RealPair, ReplayedPair
from results import add_measuring_options, append_line, loop_facts, run_facts
from width import DRAFT, TARGET

from card.errors import CardError
from card.planner.profile import load_profile

DEFAULT_WIDTH = 45


def ablations(width: int, layers: int) -> Mapping[str, LoopSettings]:
    """Return what is compared, the whole method first."""

    def settings(beam_width: int, variant: Variant = "card") -> LoopSettings:
        return LoopSettings(beam_width=beam_width, layers_per_round=layers, variant=variant)

    return MappingProxyType(
        {
            "whole": settings(width),
            "no secondary tier": settings(width, "one-tier"),
            "one path": settings(1),
            "no re-rooting": settings(1, "no-re-rooting"),  # whatever the width: nothing of it is ever verified
            "no re-rooting, in turns": settings(1, "no-re-rooting-turns"),
        }
    )


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each workload and ablation. Raises: CardError."""
    torch.set_num_threads(args.threads)
    pair = RealPair(args.target, args.draft, dtype=args.dtype, draft_dtype=args.draft_dtype)
    facts = run_facts()
    data = args.data or ["questions", "code"]
    for workload in pair.workloads(data, skip=args.skip, limit=args.limit, max_tokens=args.max_tokens):
        for name, settings in ablations(args.width, args.layers).items():
            counts = pair.count(settings, workload.prompts, args.max_tokens)
            yield {
                "kind": "ablation",
                "basis": "measured",
                "ablation": name,
                **pair.facts(),
                **workload.facts(),
                "max_tokens": args.max_tokens,
                **loop_facts(settings, counts),
                **facts,
            }


def simulate(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each made-up pair and ablation. Raises: CardError."""
    target, draft = load_profile(TARGET), load_profile(DRAFT)
    costs = Costs.of(f"{draft.name} -> {target.name}", target, draft, keeps_books=False)
    facts = run_facts()
    for workload, behaviour in FITTED.items():
        pair = ReplayedPair(make_recording(behaviour, num_texts=args.limit))
        for name, settings in ablations(args.width, args.layers).items():
            (timed,) = pair.run(settings, [costs])
            yield {
                "kind": "ablation",
                "basis": "simulated",
                "ablation": name,
                **pair.facts(costs),
                "workload": workload,
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
    simulating.add_argument("--limit", type=int, default=8, help="texts of a made-up pair (default: %(default)s)")
    for one in (measuring, simulating):
        one.add_argument("--width", type=int, default=DEFAULT_WIDTH, help="K (default: %(default)s)")
        one.add_argument("--layers", type=int, default=LAYERS_PER_ROUND, help="per target pass (default: %(default)s)")
        one.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args(argv)
    try:
        for line in (measure if args.kind == "measure" else simulate)(args):
            append_line(args.out, line)
            print(
                f"{line['workload']}, {line['ablation']}: {line['tokens_per_pass']:.2f} tokens a target pass, "
                f"hits {line['hit_rate']:.3f}",
                flush=True,
            )
    except CardError as error:
        print(f"ablation.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
