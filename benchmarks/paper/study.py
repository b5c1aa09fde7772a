"""What the studies here have in common: each is measured on models or simulated, and writes a line for each point."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import torch
from loop import Counts, LoopSettings
from options import append_lines, describe_run
from pairs import Costs, RealPair, ReplayedPair, Timed

from card.errors import CardError

Line = dict[str, Any]
Point = tuple[Mapping[str, Any], LoopSettings]
"""What a line says of a point besides, and how the loop runs there."""


@dataclass(frozen=True, slots=True)
class Study:
    """One question, asked of real models and of the virtual clock."""

    kind: str  # the name in its lines
    add_options: Callable[[argparse.ArgumentParser, argparse.ArgumentParser], None]  # of measuring and of simulating
    measure: Callable[[argparse.Namespace], Iterator[Line]]
    simulate: Callable[[argparse.Namespace], Iterator[Line]]
    say: Callable[[Line], str]  # what is printed of a line

    def main(self, doc: str, argv: Sequence[str] | None) -> int:
        """Run it as a script of this description. Returns the exit status."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        bases = parser.add_subparsers(dest="basis", required=True)
        measuring, simulating = bases.add_parser("measure"), bases.add_parser("simulate")
        _add_measuring_options(measuring)
        simulating.add_argument("--limit", type=int, default=8, help="texts of a made-up pair (default: %(default)s)")
        self.add_options(measuring, simulating)
        for one in (measuring, simulating):
            one.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
        args = parser.parse_args(argv)
        facts = describe_run()
        try:
            for line in (self.measure if args.basis == "measure" else self.simulate)(args):
                append_lines(args.out, [{"kind": self.kind, **line, **facts}])
                print(self.say(line), flush=True)
        except CardError as error:
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
            return 2
        return 0


def loop_facts(settings: LoopSettings, counts: Counts) -> dict[str, Any]:
    """Return what a line says of one run of the loop."""
    draft = settings.draft
    return {
        "variant": settings.variant,
        "beam_width": settings.beam_width,
        "layers_per_round": settings.layers_per_round,
        "branch": draft.branch,
        "lead": draft.lead,
        "tokens_per_pass": round(counts.tokens_per_pass, 4),
        "hit_rate": round(counts.hit_rate, 4),
        "zero_rate": round(counts.zero_rate, 4),
        "counts": asdict(counts),
    }


def measured(args: argparse.Namespace, drafts: Sequence[str], points: Sequence[Point]) -> Iterator[Line]:
    """Yield a line for each draft model, workload and point. Raises: CardError."""
    torch.set_num_threads(args.threads)
    data = args.data or ["questions", "code"]
    for draft in drafts:
        pair = RealPair(args.target, draft, dtype=args.dtype, draft_dtype=args.draft_dtype)
        for workload in pair.workloads(data, skip=args.skip, limit=args.limit, max_tokens=args.max_tokens):
            for told, settings in points:
                counts = pair.count(settings, workload.prompts, args.max_tokens)
                yield {
                    "basis": "measured",
                    **told,
                    **pair.facts(),
                    **workload.facts(),
                    "max_tokens": args.max_tokens,
                    **loop_facts(settings, counts),
                }


def simulated(pair: ReplayedPair, costs: Costs, point: Point, timed: Timed) -> Line:
    """Return the line of a point in virtual time."""
    told, settings = point
    return {
        "basis": "simulated",
        **pair.facts(costs),
        **told,
        "speed_up": round(timed.speed_up, 4),
        **loop_facts(settings, timed.counts),
    }


def fractions(text: str) -> tuple[float, ...]:
    """Return "0.8,0.9" as numbers. Raises: ValueError if it is none."""
    return tuple(float(part) for part in text.split(","))


def speed_of(line: Line) -> str:
    """Return what is printed of the speed, if the line has one."""
    return f", {line['speed_up']:.2f} times plain decoding" if "speed_up" in line else ""


def _add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of what the models of this machine decode."""
    parser.add_argument("--target", default="demo-target", help="folder or name (default: %(default)s)")
    parser.add_argument(
        "--dtype", default="float32", help="of the target: float32, bfloat16, ... (default: %(default)s)"
    )
    parser.add_argument("--draft-dtype", default="auto", help="auto: as stored (default: %(default)s)")
    parser.add_argument(
        "--data", action="append", help="as of `card bench --data`, such as gsm8k=FILE (default: questions, code)"
    )
    parser.add_argument("--skip", type=int, default=0, help="leave out the first prompts of each data set")
    parser.add_argument("--limit", type=int, default=10, help="prompts of each data set (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens a prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
