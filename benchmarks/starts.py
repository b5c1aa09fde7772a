"""Is the start that somebody types as fast as the best that could be typed?

    python benchmarks/starts.py                                           # the demo pair at 90M and 300M, int8
    python benchmarks/starts.py --pair TARGET.gguf+DRAFT.gguf --methods card --limit 1
    python benchmarks/starts.py --demo 3                                  # `card demo` three times: medians

Every start is a new process that makes `card.LLM` with nothing set, and decodes the prompts greedily. "fresh" begins
with an empty cache folder; "busy" too, and its first start runs beside a process for each core that only burns time.
Second and third starts take what the first one kept, on the quiet machine. Beside them are starts with a fixed number
of threads. Rows alternate. Texts are compared before any speed is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import options
from pages import markdown

import card
from card.errors import CardError
from card.tools.bench.datasets import parse_spec, read_datasets
from card.tools.bench.environment import allowed_cores

_RESULTS = Path(__file__).parent / "results" / "starts.jsonl"
_METHODS = ("card", "vanilla", "suffix")
_DEMO_PAIRS = ("demo-target@90M+demo-draft", "demo-target@300M+demo-draft")
_TIMEOUT_S = 600.0
_DEMO_ROW = re.compile(r"│\s*(vanilla|sps|card)\s*│\s*([\d.]+)\s*│")
_COLUMNS = ("start", "tokens/s", "threads", "share of the best --threads")

# Takes the settings of `LLM`, prompts and the most new tokens; tells tokens and seconds of decoding, as in `card demo`.
_START = """
import json, sys, time
job, started = json.load(sys.stdin), time.perf_counter()
from card import LLM, SamplingParams
with LLM(**job["llm"]) as llm:
    up_s = time.perf_counter() - started
    params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"]).resolved()
    texts, tokens, seconds = [], 0, 0.0
    for prompt in job["prompts"]:
        token_ids = []
        for chunk in llm.stream([{"role": "user", "content": prompt}], params):
            token_ids += chunk.token_ids
        texts.append(token_ids)
        tokens, seconds = tokens + len(token_ids) - 1, seconds + chunk.stats.decode_s
    threads = llm.host.policy.cores.threads
print(json.dumps({"up_s": up_s, "tokens_per_s": tokens / seconds, "token_ids": texts, "threads": threads}))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a round."""

    kind: str  # fresh, busy or --threads N
    number: int  # the how manyth with the same cache folder
    threads: int | None = None  # None: nothing is set
    is_beside_busy: bool = False

    @property
    def name(self) -> str:
        """The row that it belongs to."""
        return self.kind if self.threads else f"{self.kind}, start {self.number}"


def starts_of(num_cores: int) -> list[Start]:
    """Return the starts of a round in their order: kinds alternate, each `--threads` row comes twice."""
    fixed = [Start(f"--threads {count}", 1, count) for count in sorted({1, num_cores})]
    by_kind = [[Start(kind, 1, None, kind == "busy") for kind in ("fresh", "busy")], fixed]
    by_kind += [[Start(kind, 2) for kind in ("fresh", "busy")], [Start(one.kind, 2, one.threads) for one in fixed]]
    return [one for some in (*by_kind, [Start(kind, 3) for kind in ("fresh", "busy")]) for one in some]


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep so many processes busy in the block."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield burners
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run_start(start: Start, llm: Mapping[str, Any], prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Start a process, let it decode the prompts, and return what it told."""
    settings = {**llm, **({"threads": start.threads} if start.threads else {})}
    job = {"llm": settings, "prompts": list(prompts), "max_tokens": max_tokens}
    env = {**os.environ, "PYTHONPATH": str(Path(card.__file__).parents[1])}
    with busy_cores(len(allowed_cores())) if start.is_beside_busy else contextlib.nullcontext():
        done = subprocess.run(
            [sys.executable, "-P", "-c", _START],
            input=json.dumps(job),
            env=env,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"starts.py: a start with {settings} failed: {done.stderr.strip().splitlines()[-1:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def measure(pair: str, method: str, prompts: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all starts of a pair and a method; return a line for each."""
    target, _, draft = pair.partition("+")
    target, _, cost = target.partition("@")
    llm = {"target": target, "method": method, "dtype": "auto" if target.endswith(".gguf") else args.dtype}
    llm |= {"target_cost": cost} if cost else {}
    llm |= {"draft": draft} if method == "card" else {}
    facts, lines = options.describe_run(), list[dict[str, Any]]()
    for repeat in range(args.repeats):
        with tempfile.TemporaryDirectory(prefix="card-starts-") as folder:
            for start in starts_of(len(allowed_cores())):
                settings = {**llm, "cache_dir": str(Path(folder) / start.kind)}
                told = run_start(start, settings, prompts, args.max_tokens)
                print(f"{pair}, {method}, {start.name}: {told['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
                line = {"benchmark": "starts", "pair": pair, "method": method, "row": start.name, "repeat": repeat}
                line |= {"max_tokens": args.max_tokens, "num_prompts": len(prompts)}
                lines.append({**line, **told, **facts})
    first = lines[0]["token_ids"]
    return [{**line, "same_text": line["token_ids"] == first} for line in lines]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of one pair and method: medians, and their share of the best row with a number of threads."""
    rates: dict[str, list[float]] = {}
    for line in lines:
        rates.setdefault(line["row"], []).append(line["tokens_per_s"])
    medians = {row: statistics.median(each) for row, each in rates.items()}
    best = max(rate for row, rate in medians.items() if row.startswith("--threads"))
    threads = {row: sorted({line["threads"] for line in lines if line["row"] == row}) for row in rates}
    rows = []
    for row in sorted(rates):
        rows.append((row, f"{medians[row]:.0f}", ", ".join(map(str, threads[row])), f"{medians[row] / best:.2f}"))
    differing = sum(not line["same_text"] for line in lines)
    title = f"{lines[0]['pair']}, {lines[0]['method']}; {differing} of {len(lines)} starts wrote another text:"
    return f"{title}\n\n{markdown(_COLUMNS, rows)}\n"


def run_demo(count: int) -> list[dict[str, Any]]:
    """Run `card demo` as it is typed, so many times; return a line for each method."""
    rates: dict[str, list[float]] = {}
    facts, is_same = options.describe_run(), True
    for _ in range(count):
        command = [sys.executable, "-P", "-m", "card", "demo"]
        env = {**os.environ, "PYTHONPATH": str(Path(card.__file__).parents[1])}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        is_same &= "All methods wrote the same text" in done.stdout
        for method, rate in _DEMO_ROW.findall(done.stdout):
            rates.setdefault(method, []).append(float(rate))
    return [
        {"benchmark": "starts", "pair": "card demo", "method": method, "row": "card demo", "same_text": is_same}
        | {"tokens_per_s_runs": each, "tokens_per_s": statistics.median(each), **facts}
        for method, each in rates.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", help=f"TARGET[@PRICE]+DRAFT; default: {' and '.join(_DEMO_PAIRS)}")
    parser.add_argument("--methods", default=",".join(_METHODS), help="with commas (default: %(default)s)")
    parser.add_argument("--dtype", default="int8", help="of models that are no GGUF files (default: %(default)s)")
    parser.add_argument("--prompts", default="questions", help="NAME of shipped prompts or NAME=FILE [questions]")
    parser.add_argument("--limit", type=int, default=2, help="prompts of a start (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of all starts (default: %(default)s)")
    parser.add_argument("--demo", type=int, metavar="N", help="run `card demo` N times and nothing else")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: %(default)s")
    args = parser.parse_args(arguments)
    if args.demo:
        lines = run_demo(args.demo)
        options.append_lines(args.out, lines)
        for line in lines:
            print(f"{line['method']}: {line['tokens_per_s']:.0f} tokens/s, runs {line['tokens_per_s_runs']}")
        print("all texts are the same" if all(line["same_text"] for line in lines) else "some texts differ")
        return 0
    try:
        dataset = read_datasets([parse_spec(args.prompts)], limit=args.limit)[0]
    except CardError as error:
        print(f"starts.py: error: {error}", file=sys.stderr)
        return 2
    prompts = [question.turns[0] for question in dataset.questions]
    for pair in args.pair or _DEMO_PAIRS:
        for method in args.methods.split(","):
            lines = measure(pair, method, prompts, args)
            options.append_lines(args.out, lines)
            print(table(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
