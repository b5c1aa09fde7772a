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

from loop import LAYERS_PER_ROUND, LoopSettings
from made_up import FITTED, make_recording
from pairs import Costs, ReplayedPair
from published import SCRIPT_WIDTHS
from study import Line, Study, fractions, measured, simulated, speed_of
from width import TARGET

from card.tools.planner.profile import load_profile

PROFILES = ("llama-3.2-1b-h100", "llama-3.1-8b-h100")
AGREEMENTS = (0.7, 0.8, 0.85, 0.9, 0.94, 0.97)
DEFAULT_WIDTH = 45


def measure(args: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each draft model and workload. Raises: CardError."""
    settings = LoopSettings(beam_width=args.width, layers_per_round=args.layers)
    return measured(args, args.draft or ["demo-draft", "demo-target"], [({}, settings)])


def simulate(args: argparse.Namespace) -> Iterator[Line]:
    """Yield a line for each draft model and agreement. Raises: CardError."""
    target = load_profile(TARGET)
    for profile_name in PROFILES:
        draft = load_profile(profile_name)
        width, layers = SCRIPT_WIDTHS[draft.name]
        settings = LoopSettings(beam_width=args.width or width, layers_per_round=layers)
        costs = Costs.of(f"{draft.name} -> {target.name}", target, draft, keeps_books=False)
        for agreement in args.agreements:
            behaviour = replace(FITTED["gsm8k"], agreement=agreement)
            pair = ReplayedPair(make_recording(behaviour, num_texts=args.limit))
            (timed,) = pair.run(settings, [costs])
            told = {
                "workload": "made up",
                "draft": draft.name,
                "draft_parameters": draft.num_parameters,
                "target_parameters": target.num_parameters,
                "agreement": agreement,
            }
            yield simulated(pair, costs, (told, settings), timed)


def add_options(measuring: argparse.ArgumentParser, simulating: argparse.ArgumentParser) -> None:
    """Add what is asked for here alone."""
    measuring.add_argument("--draft", action="append", help="folder or name (default: demo-draft, and the target)")
    measuring.add_argument("--width", type=int, default=DEFAULT_WIDTH, help="K (default: %(default)s)")
    measuring.add_argument(
        "--layers", type=int, default=LAYERS_PER_ROUND, help="per target pass (default: %(default)s)"
    )
    simulating.add_argument("--width", type=int, help="K (default: that of CARD's scripts for each draft)")
    simulating.add_argument(
        "--agreements", type=fractions, default=AGREEMENTS, help="such as 0.8,0.9 (default: 0.7 to 0.97)"
    )


def say(line: Line) -> str:
    """Return what is printed of a line."""
    tokens = f"{line['tokens_per_pass']:.2f} tokens a target pass"
    return f"{line['draft']}, {line['workload']}: {tokens}{speed_of(line)}"


STUDY = Study("draft-size", add_options, measure, simulate, say)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    return STUDY.main(__doc__ or "", argv)


if __name__ == "__main__":
    sys.exit(main())
