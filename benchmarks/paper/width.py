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

from loop import LAYERS_PER_ROUND, LoopSettings
from made_up import FITTED, make_recording
from pairs import Costs, ReplayedPair
from published import WIDTHS
from study import Line, Study, measured, simulated, speed_of

from card.tools.planner.profile import load_profile
from card.tools.planner.recording import load_recording

TARGET, DRAFT = "llama-3.1-70b-4xh100", "llama-3.2-1b-h100"


def _settings(args: argparse.Namespace) -> list[LoopSettings]:
    return [LoopSettings(beam_width=width, layers_per_round=args.layers) for width in args.widths]


def measure(args: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each workload and width. Raises: CardError."""
    return measured(args, [args.draft], [({}, settings) for settings in _settings(args)])


def simulate(args: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each workload, width and with and without the time around passes. Raises: CardError."""
    target, draft = load_profile(args.target), load_profile(args.draft)
    recordings = {name: make_recording(behaviour, num_texts=args.limit) for name, behaviour in FITTED.items()}
    if args.recording is not None:
        recordings = {args.workload: load_recording(args.recording)}
    name = f"{draft.name} -> {target.name}{f' at the price of {target.cost_of}' if target.cost_of else ''}"
    costs = [Costs.of(name, target, draft, keeps_books=keeps_books) for keeps_books in (False, True)]
    for workload, recording in recordings.items():
        pair = ReplayedPair(recording)
        for settings in _settings(args):
            for one, timed in zip(costs, pair.run(settings, costs), strict=True):
                pass_ms = round(1e3 * one.drafter_s(settings.beam_width, 128), 4)
                yield simulated(pair, one, ({"workload": workload, "drafter_pass_ms": pass_ms}, settings), timed)


def add_options(measuring: argparse.ArgumentParser, simulating: argparse.ArgumentParser) -> None:
    """Add what is asked for here alone."""
    measuring.add_argument("--draft", default="demo-draft", help="folder or name (default: %(default)s)")
    simulating.add_argument("--target", default=TARGET, help="profile: a file or a shipped one (default: %(default)s)")
    simulating.add_argument("--draft", default=DRAFT, help="the same (default: %(default)s)")
    simulating.add_argument("--recording", type=Path, help="file of `card record` instead of made-up pairs")
    simulating.add_argument("--workload", default="gsm8k", help="what was recorded (default: %(default)s)")
    for one in (measuring, simulating):
        one.add_argument("--widths", type=_numbers, default=WIDTHS, help="K, such as 5,25 (default: as published)")
        one.add_argument("--layers", type=int, default=LAYERS_PER_ROUND, help="per target pass (default: %(default)s)")


def say(line: Line) -> str:
    """Return what is printed of a line."""
    return (
        f"{line['workload']}, K = {line['beam_width']}: {line['tokens_per_pass']:.2f} tokens a target pass, "
        f"hits {line['hit_rate']:.3f}{speed_of(line)}"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


STUDY = Study("width", add_options, measure, simulate, say)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    return STUDY.main(__doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
