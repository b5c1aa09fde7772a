"""How long until a pair of GGUF files says something, and what does a start cost?

Every run is a process of its own, `card generate` until its 64th token, timed from its start. What starts keep for
later ones lies in a folder of this run: "cold" begins with an empty one, "warm" with what the cold start left there.
The files are read once before. Processor time and memory are those of the command and of the processes that it starts:
pages that they share count once (Pss), and pages of mapped files count as long as they are in memory.

    python benchmarks/engine/startup.py --target TARGET.gguf --draft DRAFT.gguf --runs 2
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options

import card
from card.tools.bench.environment import allowed_cores

_QUESTION = "Tom has 3 boxes with 8 pencils each. He gives away 5. How many has he left?"
_TIMEOUT_S = 120.0
_NUM_TOKENS = 64  # that a pair of files writes
_LOOK_S = 0.1  # between looks at the memory of a run


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


def start_once(command: Sequence[str], cache: str) -> dict[str, float]:
    """Run a command to its end; return seconds to its first byte and to its end, and what all of it costs."""
    env = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(Path(card.__file__).parents[1])}
    used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        with Watch(process.pid) as watch:
            process.stdout.read(1)
            first_s = time.perf_counter() - started
            process.stdout.read()
            process.wait(_TIMEOUT_S)
            end_s = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit status {process.returncode}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"first text": first_s, "end": end_s, "cpu_s": cpu_s, "peak_bytes": watch.peak_bytes}


def measure_pair(files: Sequence[Path], dtype: str, num_runs: int) -> list[dict[str, Any]]:
    """Start with a pair of files as often as asked, with nothing kept and with what is kept; return what it took."""
    for file in files:
        file.read_bytes()
    target, draft = map(str, files)
    command = [sys.executable, "-P", "-m", "card", "generate", _QUESTION, "--dtype", dtype, "--target", target]
    command += ["--draft", draft, "--max-tokens", str(_NUM_TOKENS), "--temperature", "0"]
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="card-startup-") as folder:
        for _ in range(num_runs):
            shutil.rmtree(folder, ignore_errors=True)
            for found in runs.values():
                found.append(start_once(command, folder))
    file_bytes, facts, lines = sum(file.stat().st_size for file in files), options.describe_run(), []
    for kind, found in runs.items():
        line: dict[str, Any] = {"benchmark": "startup", "kind": f"{target} with {draft}, {kind}", "dtype": dtype}
        line |= {"cores": len(allowed_cores()), "file_bytes": file_bytes, **facts}
        line["seconds_until"] = {mark: [round(one[mark], 4) for one in found] for mark in ("first text", "end")}
        line["cpu_s"] = [round(one["cpu_s"], 2) for one in found]
        line["peak_bytes"] = [one["peak_bytes"] for one in found]
        first, end = (statistics.median(seconds) for seconds in line["seconds_until"].values())
        print(
            f"{line['kind']}: first text at {first:.2f} s, end at {end:.2f} (medians); {min(line['cpu_s']):.1f} s of "
            f"processor time in all; at most {max(line['peak_bytes']) / file_bytes:.2f} times the files"
        )
        lines.append(line)
    return lines


def main() -> None:
    """Start as often as asked, and print and keep what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each kind [5]")
    parser.add_argument("--target", type=Path, required=True, help="GGUF file")
    parser.add_argument("--draft", type=Path, required=True, help="GGUF file of the draft model")
    parser.add_argument("--dtype", default="auto", help="of both models [auto: as stored]")
    parser.add_argument("--out", type=Path, help="file to append a line of JSON for each kind to")
    args = parser.parse_args()
    lines = measure_pair((args.target, args.draft), args.dtype, args.runs)
    if args.out:
        options.append_lines(args.out, lines)


if __name__ == "__main__":
    main()
