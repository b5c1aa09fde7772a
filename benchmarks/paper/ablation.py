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
from types import MappingProxyType

from loop import LAYERS_PER_ROUND, LoopSettings, Variant
from made_up import FITTED, make_recording
from pairs import Costs, ReplayedPair
from study import Line, Study, measured, simulated
from width import DRAFT, TARGET

from card.tools.planner.profile import load_profile

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


def measure(args: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each workload and ablation. Raises: CardError."""
    points = [({"ablation": name}, settings) for name, settings in ablations(args.width, args.layers).items()]
    return measured(args, [args.draft], points)


def simulate(args: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each made-up pair and ablation. Raises: CardError."""
    target, draft = load_profile(TARGET), load_profile(DRAFT)
    costs = Costs.of(f"{draft.name} -> {target.name}", target, draft, keeps_books=False)
    for workload, behaviour in FITTED.items():
        pair = ReplayedPair(make_recording(behaviour, num_texts=args.limit))
        for name, settings in ablations(args.width, args.layers).items():
            (timed,) = pair.run(settings, [costs])
            yield simulated(pair, costs, ({"ablation": name, "workload": workload}, settings), timed)


def add_options(measuring: argparse.ArgumentParser, simulating: argparse.ArgumentParser) -> None:
    """Add what is asked for here alone."""
    measuring.add_argument("--draft", default="demo-draft", help="folder or name (default: %(default)s)")
    for one in (measuring, simulating):
        one.add_argument("--width", type=int, default=DEFAULT_WIDTH, help="K (default: %(default)s)")
        one.add_argument("--layers", type=int, default=LAYERS_PER_ROUND, help="per target pass (default: %(default)s)")


def say(line: Line) -> str:
    """Return what is printed of a line."""
    return (
        f"{line['workload']}, {line['ablation']}: {line['tokens_per_pass']:.2f} tokens a target pass, "
        f"hits {line['hit_rate']:.3f}"
    )


STUDY = Study("ablation", add_options, measure, simulate, say)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    return STUDY.main(__doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
