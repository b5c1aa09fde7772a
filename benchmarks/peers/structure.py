"""How fast do families of today run beside llama.cpp, from one file for both? Models of random weights and real widths.

    python benchmarks/peers/structure.py --tokenizer qwen-0.5b.gguf --out structure_mine.jsonl

Both engines read the same random token ids: prompts of two lengths, then one token after the other. llama.cpp runs its
own `llama-bench`. We time the model alone, as that does, and besides what passes of several rows cost: in each of them
all rows are dropped but the first, as if no candidate were right. Engines take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import environments
import msgspec
from catalog import IK, OURS
from environments import BuildError, run_logged

from card.machine.processor import kernel_kind
from card.machine.threads import integer_passes_on
from card.models.loading import load_decoder
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner
from card.tools.bench.environment import describe_run

_HERE = Path(__file__).parent
_NAMES = ("moe-1.4B", "oss-1.8B", "lfm-350M", "q35-0.8B")
_PROMPTS = (64, 512)
_ROWS = (1, 2, 4, 8, 16)
_STEPS = 64
_MOST_ID = 30000  # what all vocabularies have

Figures = dict[str, float]


def our_figures(file: Path, *, threads: int, seed: int) -> Figures:
    """Return tokens per second of prompts and of one token after another, and prices of passes of several rows."""
    runner, ids = (
        plain_runner(load_decoder(file, cache_dir=str(file.parent / "kept")), max_model_len=2048),
        random.Random(seed),
    )
    with integer_passes_on(threads):
        _prompt(runner, _some(ids, _PROMPTS[0]))  # a pass of each kind touches its memory first
        figures = {f"prompt {count}": count / _prompt(runner, _some(ids, count)) for count in _PROMPTS}
        times = _times_of_rows(runner, lambda count: _some(ids, count))
    figures["decode"] = 1 / times[1]
    return figures | {f"rows {count}": times[count] / times[1] for count in _ROWS[1:]}


def _some(ids: random.Random, count: int) -> list[int]:
    return [ids.randrange(_MOST_ID) for _ in range(count)]


def _prompt(runner: RowRunner, token_ids: Sequence[int]) -> float:
    """Return the seconds that a text takes."""
    slot, begin = runner.open(), time.perf_counter()
    runner.forward([Extension.of_text(slot, token_ids)])
    took = time.perf_counter() - begin
    runner.close(slot)
    return took


def _times_of_rows(runner: RowRunner, some: Callable[[int], list[int]]) -> dict[int, float]:
    """Return the median seconds of passes by their rows, which take turns."""
    slot, times = runner.open(), dict[int, list[float]]()
    runner.forward([Extension.of_text(slot, some(_PROMPTS[0]))])
    for held in range(_PROMPTS[0], _PROMPTS[0] + _STEPS * len(_ROWS)):
        count = _ROWS[held % len(_ROWS)]
        begin = time.perf_counter()
        runner.forward([Extension(slot, some(count), range(held - 1, held - 1 + count))])
        runner.keep(slot, held + 1)
        times.setdefault(count, []).append(time.perf_counter() - begin)
    runner.close(slot)
    return {count: statistics.median(of) for count, of in times.items()}


def llama_figures(file: Path, *, program: Path, threads: int, flags: Sequence[str] = ()) -> Figures:
    """Return the same of a `llama-bench`, but for passes of several rows. Raises: BuildError if it fails."""
    command = [program, "-m", file, "-t", threads, "-p", ",".join(map(str, _PROMPTS)), "-n", _STEPS, "-r", 1]
    done = subprocess.run([*map(str, command), *flags, "-o", "json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"llama-bench ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    found: Figures = {}
    for run in json.loads(done.stdout):
        name = f"prompt {run['n_prompt']}" if run["n_prompt"] else "decode"
        found[name] = float(run["avg_ts"])
    return found


def _in_turns(args: argparse.Namespace, name: str, file: Path) -> list[dict[str, Any]]:
    """Return the lines of one model: both engines, so often."""
    program, lines = environments.llama_program(args.envs, "llama-bench"), []
    for repeat in range(args.repeats):
        own = [sys.executable, __file__, "--own", str(file), "--threads", str(args.threads), "--seed", str(repeat)]
        engines: dict[str, Callable[[], Figures]] = {
            OURS: lambda own=own: json.loads(subprocess.check_output(own, text=True)),
            "llama.cpp": lambda: llama_figures(file, program=program, threads=args.threads),
        }
        if args.ik is not None:
            ik = environments.ik_program(args.ik, "llama-bench")
            engines[IK] = lambda ik=ik: llama_figures(file, program=ik, threads=args.threads, flags=("-rtr", "1"))
        for engine, measure in engines.items():
            figures = measure()
            lines.append({"benchmark": "structure", "model": name, "engine": engine, "repeat": repeat, **figures})
            print(name, engine, {key: round(value, 2) for key, value in figures.items()}, flush=True)
    return lines


def _median(lines: Sequence[Mapping[str, Any]], model: str, engine: str, key: str) -> float:
    return statistics.median(line[key] for line in lines if (line["model"], line["engine"]) == (model, engine))


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of medians, and of ours over those of the others."""
    others = [engine for engine in dict.fromkeys(line["engine"] for line in lines) if engine != OURS]
    rows = ["| model | prompt 64 | prompt 512 | decode | rows 2 / 4 / 8 / 16 |", "|---|---:|---:|---:|---:|"]
    for name in dict.fromkeys(line["model"] for line in lines):
        cells = []
        for key in (*(f"prompt {count}" for count in _PROMPTS), "decode"):
            own, *found = (_median(lines, name, engine, key) for engine in (OURS, *others))
            cells.append(", ".join(f"{own:.0f} / {other:.0f} = {own / other:.2f}" for other in found))
        prices = " / ".join(f"{_median(lines, name, OURS, f'rows {count}'):.2f}" for count in _ROWS[1:])
        rows.append(f"| {name} | {' | '.join(cells)} | {prices} |")
    return "\n".join([*rows, "", f"Ours over {', then '.join(others)}."])


def _files(args: argparse.Namespace) -> dict[str, Path]:
    """Return the models, made where they are missing."""
    files = {name: args.models / f"{name}.gguf" for name in args.names or _NAMES}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        if args.tokenizer is None:
            raise BuildError(f"{', '.join(missing)} must be made first: name a GGUF file of Qwen's by --tokenizer")
        script = [sys.executable, _HERE / "structure_models.py", "--tokenizer", args.tokenizer, "--into", args.models]
        run_logged([*script, *missing], args.envs / "logs" / "structure-models.log")
    return files


def main() -> int:
    """Do what the command line says. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *_NAMES], help="default: all of them")
    parser.add_argument("--envs", type=Path, default=environments.default_folder(), help="where llama.cpp is built")
    parser.add_argument("--ik", type=Path, metavar="FOLDER", help="a build of ik_llama.cpp, which is measured too")
    parser.add_argument("--models", type=Path, default=environments.default_folder() / "structure")
    parser.add_argument("--tokenizer", type=Path, help="a GGUF file of Qwen's, for models that are not there yet")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where results go, as JSON lines")
    parser.add_argument("--own", type=Path, help=argparse.SUPPRESS)  # what a process of one repeat measures
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own is not None:
        print(json.dumps(our_figures(args.own, threads=args.threads, seed=args.seed)))
        return 0
    try:
        if args.ik is not None:
            environments.ik_program(args.ik, "llama-bench")
        environments.ensure(args.envs, "llama.cpp")
        described = msgspec.to_builtins(describe_run())
        lines = [line for name, file in _files(args).items() for line in _in_turns(args, name, file)]
    except (BuildError, OSError, subprocess.CalledProcessError) as error:
        print(f"structure.py: {error}", file=sys.stderr)
        return 1
    print(_table(lines))
    if args.out is not None:
        facts = {"threads": args.threads, "kernels": kernel_kind(), **described}
        text = "".join(json.dumps({**line, **facts}) + "\n" for line in lines)
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
