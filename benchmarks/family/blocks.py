"""Ask how fast blocks draft at a set acceptance: models of random weights and real widths, each with a block.

    python benchmarks/family/blocks.py --tokenizer qwen-0.5b.gguf --models FOLDER --out blocks.jsonl

Models that are not in the folder are made (2.9 GB). Each is one run of `card bench`, whose lines are appended; rows are
plain decoding, chains of two and three, and the default. A coin for each place accepts the likeliest candidate, so the
texts say nothing. A run that takes too long is stopped; the others go on. `--avx2` holds everything to AVX2. The models
are mapped: without 6 GB of free memory the largest is read from the disk again and again, and does not end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NAMES = ("q35-0.8B-mtp", "moe-1.4B-mtp", "oss-1.8B-mtp")
_MAKER = Path(__file__).parents[1] / "peers" / "structure_models.py"
_MOST_SECONDS = 160.0  # of a run: all three take less than eight minutes


def bench_command(target: str, draft: str, args: argparse.Namespace) -> list[str]:
    """Return the arguments of `card bench` for a pair."""
    rows = ["--methods", "vanilla,sps,card", "--sps-lengths", "2,3", "--force-acceptance", str(args.acceptance)]
    rows += ["--temperature", "1"]  # greedily, random weights repeat a token, and all is copied
    texts = ["--limit", str(args.limit), "--max-tokens", str(args.max_tokens), "--repeats", str(args.repeats), "--raw"]
    return ["bench", "--target", target, "--draft", draft, *rows, *texts, "--out", str(args.out)]


def run_all(args: argparse.Namespace) -> list[str]:
    """Run `card bench` for each model and pair. Returns: the targets of those that did not end well."""
    environment = {**os.environ, **({"CARD_KERNELS": "avx2"} if args.avx2 else {})}
    pairs, failed = [tuple(pair) for pair in args.pair], list[str]()
    for name in args.names or ([] if pairs else NAMES):
        model = args.models / f"{name}.gguf"
        if not model.exists():
            made_by = [str(_MAKER), "--tokenizer", str(args.tokenizer), "--into", str(args.models), name]
            subprocess.run([sys.executable, *made_by], check=True)
        pairs.append((str(model), "mtp"))
    for target, draft in pairs:
        command, started = bench_command(target, draft, args), time.monotonic()
        print(shlex.join(["card", *command]), flush=True)
        if not _ends_well(command, environment, args.most_seconds):
            failed.append(target)
        print(f"{target}: {time.monotonic() - started:.0f} s", flush=True)
    return failed


def _ends_well(command: Sequence[str], environment: dict[str, str], most_seconds: float) -> bool:
    try:
        card = [sys.executable, "-m", "card", *command]
        done = subprocess.run(card, check=False, env=environment, timeout=most_seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(given: Sequence[str] | None = None) -> None:
    """Run the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"default: {', '.join(NAMES)}")
    parser.add_argument("--models", type=Path, default=Path(), help="folder of the models")
    parser.add_argument(
        "--pair", nargs=2, action="append", default=[], help="a target, and a head: with the names, or alone"
    )
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file of Qwen's, for models that are made")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--limit", type=int, default=3, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--most-seconds", type=float, default=_MOST_SECONDS, help="of each run")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="lines are appended to this file")
    args = parser.parse_args(given)
    if failed := run_all(args):
        sys.exit(f"did not end well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
