"""Which latencies, agreement and devices give which speed: the planner's map, on which 4.83 times is a line.

    python benchmarks/paper/speed_map.py --out benchmarks/results/paper_speed_map.jsonl

A made-up pair (`made_up.py`) agrees at so many places, and a target pass takes as long as so many drafter passes. The
drafter has a device of its own, or takes turns with the target on one. Method `card` runs as it is by default, on the
clock of `card plan`: what it does around passes is charged as `card plan` charges it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import msgspec
from made_up import FITTED, make_recording
from options import append_lines, describe_run
from study import fractions
from width import TARGET

from card.tools.planner.profile import PassTable, Profile, Setup, load_profile
from card.tools.planner.scenario import Scenario
from card.tools.planner.simulate import Simulator

AGREEMENTS = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
RATIOS = (2, 3, 5, 7, 10, 15, 20, 30)  # drafter passes in a target pass
DEVICES = ("own", "shared")  # of the drafter


def map_lines(agreements: Sequence[float], ratios: Sequence[int], num_texts: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each point of the map."""
    target = load_profile(TARGET)
    pass_s = target.setup().pass_cost().seconds(1)
    for agreement in agreements:
        recording = make_recording(replace(FITTED["gsm8k"], agreement=agreement), num_texts=num_texts)
        for ratio in ratios:
            for device in DEVICES:
                threads = 1 if device == "shared" else None  # a device without threads stands for hardware of its own
                scenario = Scenario(
                    target=_profile(target, "target", pass_s, threads),
                    draft=_profile(target, "draft", pass_s / ratio, threads),
                    recording=recording,
                )
                simulator = Simulator(scenario)
                plain, card = simulator.run("vanilla"), simulator.run("card")
                yield {
                    "kind": "speed-map",
                    "basis": "simulated",
                    "agreement": agreement,
                    "ratio": ratio,
                    "devices": device,
                    "target_pass_ms": round(pass_s * 1e3, 3),
                    "draft_pass_ms": round(pass_s / ratio * 1e3, 3),
                    "speed_up": round(card.tokens_per_s / plain.tokens_per_s, 4),
                    "tokens_per_pass": round(card.total.mean_acceptance_length, 4),
                    "hit_rate": round(card.total.hit_rate, 4),
                    "schedules": dict(card.schedules),
                }


def _profile(like: Profile, name: str, pass_s: float, threads: int | None) -> Profile:
    """Return a profile whose passes of few tokens all take so long."""
    setup = Setup(threads=threads, cost=PassTable(points=((1, pass_s), (64, pass_s))))
    return msgspec.structs.replace(like, name=name, source="made up: passes of up to 64 tokens alike", setups=(setup,))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--agreements", type=fractions, default=AGREEMENTS, help="such as 0.8,0.9 (default: 0.6 to 0.95)"
    )
    parser.add_argument("--ratios", type=fractions, default=RATIOS, help="such as 2,7 (default: 2 to 30)")
    parser.add_argument("--limit", type=int, default=8, help="texts of the made-up pair (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args(argv)
    facts = describe_run()
    for line in map_lines(args.agreements, args.ratios, args.limit):
        append_lines(args.out, [line | facts])
        print(f"{line['devices']}, agreement {line['agreement']}, {line['ratio']}: {line['speed_up']:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
