"""How fast are several chats at once over HTTP: llama.cpp's server, ours plain, and `card serve`?

    python benchmarks/server/served.py --target TARGET.gguf --draft DRAFT.gguf --llama-server PATH/llama-server
    python benchmarks/server/served.py --target FOLDER --draft FOLDER --dtype int8 --peer-target TARGET-Q8_0.gguf ...

Eight chats, four at a time, streamed to clients in a process of their own; no text ends before its last token. One
server at a time: it starts, answers all chats once for warming up and then as often as asked, and ends. The servers
take turns. Texts are compared before any speed is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options

import card
from card.errors import CardError
from card.models.loading import load_tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets
from card.tools.bench.environment import allowed_cores

_CLIENT = Path(__file__).with_name("sse_clients.py")
_RESULTS = Path(__file__).parents[1] / "results" / "served.jsonl"
NAME = "model"
_START_S, _END_S, _RUN_S = 300.0, 20.0, 600.0
_CONTEXT = 1024  # tokens of a slot of llama.cpp

Line = dict[str, Any]


def own_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return what starts each server of ours, but for its port."""
    threads = str(len(allowed_cores()))
    ours = [sys.executable, "-P", "-m", "card", "serve", args.target, "--dtype", args.dtype]
    ours += ["--served-model-name", NAME]
    ours += ["--target-cost", args.target_cost] if args.target_cost else []
    with_draft = [*ours, "--draft", args.draft]
    return {
        "card serve --method vanilla --threads": [*ours, "--method", "vanilla", "--threads", threads],
        "card serve --threads": [*with_draft, "--threads", threads],
        "card serve": with_draft,
    }


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return what starts each server, but for its port."""
    found = own_commands(args)
    if args.llama_server:
        threads, slots, target = str(len(allowed_cores())), str(args.concurrency), args.peer_target or args.target
        theirs = [args.llama_server, "-m", target, "-t", threads, "-tb", threads, "-np", slots, "-ngl", "0"]
        found = {"llama-server": [*theirs, "-c", str(_CONTEXT * args.concurrency), "--no-webui"], **found}
    return found


@contextlib.contextmanager
def serving(command: Sequence[str], cache: str, path: str = "/health") -> Iterator[int]:
    """Run a server in the block and give its port. Raises: SystemExit if it does not come up: ``path`` tells."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(Path(card.__file__).parents[1])}
    log = Path(cache) / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--port", str(port)], env=env, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_S
        while not _is_up(port, path):
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                raise SystemExit(f"served.py: {Path(command[0]).name} did not come up: {' | '.join(said)}")
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def answer(port: int, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int) -> Line:
    """Let the clients ask for all prompts once; return seconds and texts."""
    body = {"model": NAME, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    bodies = [{**body, "prompt": list(prompt)} for prompt in prompts]
    task = json.dumps({"port": port, "concurrency": concurrency, "bodies": bodies})
    command = [sys.executable, str(_CLIENT)]
    done = subprocess.run(command, input=task, capture_output=True, text=True, timeout=_RUN_S, check=False)
    if done.returncode:
        raise SystemExit(f"served.py: the clients failed: {done.stderr.strip()[-300:]}")
    told: Line = json.loads(done.stdout)
    return told


def measure(args: argparse.Namespace) -> list[Line]:
    """Run all servers by turns; return a line for each. Raises: CardError."""
    dataset = read_datasets([parse_spec(args.prompts)], limit=None)[0]
    tokenizer = load_tokenizer(args.target)
    questions = [dataset.questions[idx % len(dataset.questions)] for idx in range(args.limit)]
    prompts = [question.encode(tokenizer) for question in questions]
    runs: dict[str, list[Line]] = {}
    facts, found = options.describe_run(), commands(args)
    with tempfile.TemporaryDirectory(prefix="card-served-") as cache:
        for round_idx in range(args.rounds):
            for name in list(found) if round_idx % 2 == 0 else reversed(list(found)):
                with serving(found[name], cache) as port:
                    answer(port, prompts, args.max_tokens, args.concurrency)
                    for _ in range(args.repeats):
                        runs.setdefault(name, []).append(answer(port, prompts, args.max_tokens, args.concurrency))
    texts = next(iter(runs.values()))[0]["texts"]
    lines = []
    for name, each in runs.items():
        rates = [args.limit * args.max_tokens / one["wall_s"] for one in each]
        line = {"benchmark": "served", "server": name, "target": args.target, "peer_target": args.peer_target}
        line |= {"dtype": args.dtype, "target_cost": args.target_cost, "concurrency": args.concurrency}
        line |= {"num_chats": args.limit, "max_tokens": args.max_tokens, "tokens_per_s_runs": rates}
        line["tokens_per_s"] = statistics.median(rates)
        line["num_texts_differing"] = sum(any(one["texts"][i] != texts[i] for one in each) for i in range(args.limit))
        lines.append({**line, **facts})
    return lines


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target", help="of ours; of llama.cpp too, unless --peer-target says")
    parser.add_argument("--draft", default="demo-draft", help="of ours (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of ours (default: %(default)s)")
    parser.add_argument("--target-cost", help="inflate our target to the price of so many parameters, such as 90M")
    parser.add_argument("--peer-target", help="GGUF file of llama.cpp")
    parser.add_argument("--llama-server", help="program (default: without llama.cpp)")
    parser.add_argument("--prompts", default="questions", help="NAME of shipped prompts or NAME=FILE [questions]")
    parser.add_argument("--limit", type=int, default=8, help="chats (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="chats at once (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each server (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs that count of a start (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    args = make_parser().parse_args(arguments)
    try:
        lines = measure(args)
    except CardError as error:
        print(f"served.py: error: {error}", file=sys.stderr)
        return 2
    options.append_lines(args.out, lines)
    print("| server | tokens/s | range | texts that differ |\n| --- | ---: | ---: | ---: |")
    for line in lines:
        low, high = min(line["tokens_per_s_runs"]), max(line["tokens_per_s_runs"])
        differing = f"{line['num_texts_differing']} of {line['num_chats']}"
        print(f"| {line['server']} | {line['tokens_per_s']:.0f} | {low:.0f}–{high:.0f} | {differing} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
