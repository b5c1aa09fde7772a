"""How fast is the publication's loop on a real pair whose drafter has a device of its own, over K and temperature?

    card profile TARGET --threads 1,2 --out target.json
    card profile DRAFT --threads 1,2 --out draft.json
    card record --target TARGET --draft DRAFT --data gsm8k=FILE --temperature 1 --seed 1 --out gsm8k-T1.rec
    python benchmarks/paper/real_loop.py --target target.json --draft draft.json --recording gsm8k=gsm8k-T1.rec \\
        --out FILE.jsonl

What happens is replayed from recordings; time is virtual, by the measured passes and the time around them. Each model
has one thread, as on two machines of one core. Layers in a round are tried, too: a wide one takes longer than a target
pass. Beside the loop stands drafting in turns, of some numbers of tokens: with a thread for each model, and with all
threads for both. All speeds are over plain decoding with one thread.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from loop import LoopSettings
from options import append_lines, describe_run, numbers
from pairs import Costs, ReplayedPair, Timed
from study import loop_facts

from card.errors import BenchError, CardError
from card.tools.planner.profile import load_profile
from card.tools.planner.recording import Recording, load_recording

KIND = "real-loop"
LOOP, TURNS, TOGETHER = "loop", "turns, one core each", "turns, all cores"
WIDTHS = (5, 25, 45, 105, 205)
TURN_TOKENS = (1, 2, 4, 6, 8)
LAYERS = (2, 3, 4, 7)  # 7 as published, for a target pass as long as so many drafter passes
_TYPICAL_ROWS = 128  # of a text


def lines_of(
    workload: str, recording: Recording, apart: Costs, together: Costs, widths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a recording: the loop over K, then turns. Raises: BenchError."""
    pair = ReplayedPair(recording)
    plain_s = apart.target_s(1, _TYPICAL_ROWS) + apart.bookkeeping.round_s

    def line(row: str, costs: Costs, settings: LoopSettings, timed: Timed) -> dict[str, Any]:
        return {
            "kind": KIND,
            "row": row,
            "workload": workload,
            "temperature": recording.temperature,
            "num_prompts": len(recording.texts),
            **pair.facts(costs),
            "drafter_pass_ms": round(1e3 * costs.drafter_s(settings.beam_width, _TYPICAL_ROWS), 4),
            "speed_up": round(timed.counts.num_tokens * plain_s / timed.decode_s, 4),
            **loop_facts(settings, timed.counts),
        }

    for width, num_layers in itertools.product(widths, LAYERS):
        settings = LoopSettings(beam_width=width, layers_per_round=num_layers)
        (timed,) = pair.run(settings, [apart])
        yield line(LOOP, apart, settings, timed)
    for num_tokens in TURN_TOKENS:
        settings = LoopSettings(beam_width=1, layers_per_round=num_tokens, variant="no-re-rooting-turns")
        for row, costs, timed in zip(
            (TURNS, TOGETHER), (apart, together), pair.run(settings, (apart, together)), strict=True
        ):
            yield line(row, costs, settings, timed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="profile of card profile")
    parser.add_argument("--draft", required=True, help="the same")
    parser.add_argument("--recording", action="append", required=True, help="NAME=FILE of card record, several times")
    parser.add_argument("--widths", type=numbers, default=WIDTHS, help="K, such as 5,25 (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args(argv)
    facts = describe_run()
    try:
        target, draft = load_profile(args.target), load_profile(args.draft)
        name = f"{draft.name} -> {target.name}"
        apart, together = (Costs.of(name, target, draft, keeps_books=True, threads=n) for n in (1, None))
        for text in args.recording:
            workload, is_given, path = text.partition("=")
            if not is_given:
                raise BenchError(f"--recording must be NAME=FILE, got {text}")
            for line in lines_of(workload, load_recording(Path(path)), apart, together, args.widths):
                append_lines(args.out, [{**line, **facts}])
                print(say(line), flush=True)
    except CardError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def say(line: dict[str, Any]) -> str:
    """Return what is printed of a line."""
    return (
        f"{line['workload']}, T {line['temperature']:g}, {line['row']}, K = {line['beam_width']}, "
        f"{line['layers_per_round']} layers: {line['tokens_per_pass']:.2f} tokens a pass, "
        f"hits {line['hit_rate']:.3f}, {line['speed_up']:.2f} times plain decoding"
    )


if __name__ == "__main__":
    sys.exit(main())
