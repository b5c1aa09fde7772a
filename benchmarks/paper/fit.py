"""Which made-up pair behaves like the published one? Prints how far each of a grid is from the published counts.

    python benchmarks/paper/fit.py --workload gsm8k --agreements 0.9,0.92 --tails 1,1.2

Fitted are tokens per target pass and the miss rate at two widths; the other widths are left for `width.py` to predict.
What was found best stands in `made_up.FITTED`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

from loop import LAYERS_PER_ROUND, LoopSettings
from made_up import Behaviour, make_recording
from pairs import Costs, ReplayedPair
from published import SWEEP

WIDTHS = (5, 45)
_MISS_WEIGHT = 5.0  # a miss rate off by 0.02 weighs as much as tokens per pass off by a tenth


def distance(behaviour: Behaviour, workload: str, num_texts: int) -> tuple[float, list[str]]:
    """Return how far a pair is from the published one, and what it does at each width."""
    costs = Costs("none", lambda _, __: 1.0, lambda _, __: 0.0)
    pair = ReplayedPair(make_recording(behaviour, num_texts=num_texts))
    total, told = 0.0, []
    for point in SWEEP[workload]:
        if point.beam_width in WIDTHS:
            (timed,) = pair.run(LoopSettings(beam_width=point.beam_width, layers_per_round=LAYERS_PER_ROUND), [costs])
            counts, miss = timed.counts, 1.0 - timed.counts.hit_rate
            total += (counts.tokens_per_pass / point.tokens_per_pass - 1.0) ** 2
            total += (_MISS_WEIGHT * (miss - point.miss_rate)) ** 2
            told.append(f"K = {point.beam_width}: {counts.tokens_per_pass:.2f}, misses {miss:.3f}")
    return total, told


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=tuple(SWEEP), required=True)
    for name in ("agreements", "spreads", "tails"):
        default = (1.5,) if name == "spreads" else None
        parser.add_argument(f"--{name}", type=_numbers, default=default, required=default is None)
    parser.add_argument("--limit", type=int, default=6, help="texts (default: %(default)s)")
    args = parser.parse_args(argv)
    for values in itertools.product(args.agreements, args.spreads, args.tails):
        behaviour = Behaviour(*values)
        found, told = distance(behaviour, args.workload, args.limit)
        print(f"{found:.4f}  {behaviour}  {'; '.join(told)}", flush=True)
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
