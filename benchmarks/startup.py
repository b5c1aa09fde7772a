"""How long until a command says something, and where the time of a start goes?

Every run is a process of its own, timed from its start: the command line's help, version and a typing error until they
end, `card generate` and `card.LLM` until their first text. What starts keep for later ones lies in a folder of this
run: "cold" begins with an empty one, "warm" with what the cold starts left there. The first run of each kind is not
counted: the system then has the files in memory.

    python benchmarks/startup.py --out startup.jsonl

With a pair of GGUF files, `card generate` alone is run, until its 64th token. The files are read once before, and each
run counts. It also tells processor time and memory, of the command and the processes that it starts: pages that they
share count once (Pss), and pages of mapped files count as long as they are in memory.

    python benchmarks/startup.py --target TARGET.gguf --draft DRAFT.gguf --runs 2
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import options

import card
from card.tools.bench.environment import allowed_cores

_QUESTION = "Tom has 3 boxes with 8 pencils each. He gives away 5. How many has he left?"
_CARD = (sys.executable, "-P", "-m", "card")
_TIMEOUT_S = 120.0
_NUM_TOKENS = 64  # that a pair of files writes
_LOOK_S = 0.1  # between looks at the memory of a run

# Tells of each phase as it begins, then of the first text, on standard output, which is read as it comes.
_LLM = """
import sys, time
def say(words): print(words, flush=True)
say("importing")
from card import LLM, SamplingParams
with LLM("demo-target", "demo-draft", dtype=sys.argv[1], say=say) as llm:
    for chunk in llm.stream([{"role": "user", "content": sys.argv[2]}], SamplingParams(temperature=0.0).resolved()):
        if chunk.text:
            say("first text")
            break
"""

Marks = dict[str, float]  # seconds from the start of the process to each mark; the last one is the answer


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a whole run."""

    cpu_s: float  # of all its processes
    peak_bytes: int  # 0 where the system does not tell


class Watch:
    """Looks at the memory of a process and of those that it started, until the block ends."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ended = pid, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peak_bytes = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(_pss_bytes, _family(self._pid))))


def _family(pid: int) -> list[int]:
    """Return a process and those below it."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    except OSError:
        return [pid]
    return [pid, *(one for child in listed.split() for one in _family(int(child)))]


def _pss_bytes(pid: int) -> int:
    """Return the memory of a process, of shared pages its part; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def costs_of(*command: str) -> Callable[[Mapping[str, str]], tuple[Marks, Costs]]:
    """Return a run to the end that notes the first byte on standard output, and what all of it costs."""

    def run(environment: Mapping[str, str]) -> tuple[Marks, Costs]:
        used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, bufsize=0) as process:
            assert process.stdout is not None
            with Watch(process.pid) as watch:
                process.stdout.read(1)
                marks = {"first text": time.perf_counter() - started}
                process.stdout.read()
                process.wait(_TIMEOUT_S)
                marks["end"] = time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed with exit status {process.returncode}")
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        return marks, Costs(cpu_s, watch.peak_bytes)

    return run


def measure_pair(files: Sequence[Path], dtype: str, num_runs: int) -> list[dict[str, object]]:
    """Start with a pair of files as often as asked, with nothing kept and with what is kept; return what it took."""
    for file in files:
        file.read_bytes()
    target, draft = map(str, files)
    run = costs_of(
        *(*_CARD, "generate", _QUESTION, "--dtype", dtype, "--target", target, "--draft", draft),
        *("--max-tokens", str(_NUM_TOKENS), "--temperature", "0"),
    )
    runs: dict[str, list[tuple[Marks, Costs]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="card-startup-") as folder:
        for _ in range(num_runs):
            shutil.rmtree(folder, ignore_errors=True)
            for found in runs.values():
                found.append(run(_environment(folder)))
    file_bytes, lines = sum(file.stat().st_size for file in files), []
    for kind, found in runs.items():
        line = _line(options.describe_run(), dtype, f"{target} with {draft}, {kind}", [marks for marks, _ in found])
        costs = [costs for _, costs in found]
        line["cpu_s"] = [round(one.cpu_s, 2) for one in costs]
        line["peak_bytes"], line["file_bytes"] = [one.peak_bytes for one in costs], file_bytes
        print(f"{_sentence(line)}; {min(one.cpu_s for one in costs):.1f} s of processor time in all", end="")
        most = max(one.peak_bytes for one in costs)
        print(f"; at most {most / 1e9:.2f} GB, {most / file_bytes:.2f} times the files")
        lines.append(line)
    return lines


def until_end(*command: str) -> Callable[[Mapping[str, str]], Marks]:
    """Return a run that ends with the process, whatever its status."""

    def run(environment: Mapping[str, str]) -> Marks:
        started = time.perf_counter()
        subprocess.run(command, env=environment, capture_output=True, check=False, timeout=_TIMEOUT_S)
        return {"end": time.perf_counter() - started}

    return run


def until_text(*command: str) -> Callable[[Mapping[str, str]], Marks]:
    """Return a run that ends with the first byte on standard output."""

    def run(environment: Mapping[str, str]) -> Marks:
        started = time.perf_counter()
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        ) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            seconds = time.perf_counter() - started
            _, errors = process.communicate(timeout=_TIMEOUT_S)
        if not first or process.returncode:
            raise SystemExit(f"{' '.join(command)} failed: {errors.decode(errors='replace')}")
        return {"first text": seconds}

    return run


def until_marks(*command: str) -> Callable[[Mapping[str, str]], Marks]:
    """Return a run that notes when each line comes on standard output."""

    def run(environment: Mapping[str, str]) -> Marks:
        started = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
            assert process.stdout is not None
            marks = {line.strip(): time.perf_counter() - started for line in process.stdout}
        if "first text" not in marks:
            raise SystemExit(f"{command[0]} gave no text; it printed {list(marks)}")
        return marks

    return run


def main() -> None:
    """Run every kind in turn, as often as asked, and print and keep what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each kind [5]")
    parser.add_argument("--target", type=Path, help="GGUF file; needs --draft")
    parser.add_argument("--draft", type=Path, help="GGUF file of the draft model")
    parser.add_argument("--dtype", default="auto", help="of both models [auto: as stored]")
    parser.add_argument("--out", type=Path, help="file to append a line of JSON for each kind to")
    args = parser.parse_args()
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    lines = (
        _measure_demo(args) if args.target is None else measure_pair((args.target, args.draft), args.dtype, args.runs)
    )
    if args.out:
        options.append_lines(args.out, lines)


def _measure_demo(args: argparse.Namespace) -> list[dict[str, object]]:
    llm = (sys.executable, "-P", "-c", _LLM, args.dtype, _QUESTION)
    generate = (*_CARD, "generate", _QUESTION, "--dtype", args.dtype)
    kinds: dict[str, tuple[Callable[[Mapping[str, str]], Marks], bool]] = {
        "card --help": (until_end(*_CARD, "--help"), False),
        "card --version": (until_end(*_CARD, "--version"), False),
        "card generat (a typing error)": (until_end(*_CARD, "generat"), False),
        "card generate, cold": (until_text(*generate), True),
        "card generate, warm": (until_text(*generate), False),
        "LLM(), cold": (until_marks(*llm), True),
        "LLM(), warm": (until_marks(*llm), False),
    }
    facts = options.describe_run()
    results: dict[str, list[Marks]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="card-startup-") as folder:
        for number in range(1 + args.runs):
            for name, (run, is_cold) in kinds.items():
                if is_cold:
                    shutil.rmtree(folder, ignore_errors=True)
                marks = run(_environment(folder))
                if number:
                    results[name].append(marks)
    lines = [_line(facts, args.dtype, name, runs) for name, runs in results.items()]
    for line in lines:
        print(_sentence(line))
    return lines


def _environment(cache: str) -> dict[str, str]:
    """Return the environment of a run: this one's, this package first, and a cache folder of its own."""
    root = str(Path(card.__file__).parents[1])
    return {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": root}


def _line(facts: Mapping[str, object], dtype: str, name: str, runs: list[Marks]) -> dict[str, object]:
    marks = {mark: [round(one[mark], 4) for one in runs] for mark in runs[0]}
    cores = len(allowed_cores())
    return {"benchmark": "startup", "kind": name, "dtype": dtype, "cores": cores, "seconds_until": marks, **facts}


def _sentence(line: Mapping[str, object]) -> str:
    marks = line["seconds_until"]
    assert isinstance(marks, dict)
    medians = {mark: statistics.median(seconds) for mark, seconds in marks.items()}
    *before, last = medians
    seconds = marks[last]
    text = f"{line['kind']}: {last} after {medians[last]:.2f} s (median; {min(seconds):.2f} to {max(seconds):.2f})"
    if before:
        text += "; " + ", ".join(f"{mark} at {medians[mark]:.2f}" for mark in before)
    return text


if __name__ == "__main__":
    main()
