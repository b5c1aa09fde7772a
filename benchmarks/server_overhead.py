"""What does the HTTP server cost beyond the engine?

One engine answers the same prompts, 16 at a time: to coroutines that read `AsyncLLM` directly, and to clients in a
process of their own that read streams over HTTP. Both ways take turns; their texts are compared before any time is
shown. The clients do as little as can be: they read bytes, and look into them when the clock has stopped.

    python benchmarks/server_overhead.py --prompts FILE.jsonl --limit 48 --max-tokens 96 --dtype float32 \\
        --out server_overhead.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import options

from card import AsyncLLM, SamplingParams
from card.assembly.plan import readable
from card.errors import CardError
from card.server.accepting import Server
from card.server.app import make_app
from card.server.config import ServerSettings
from card.server.connections import ServerConfig
from card.server.listening import bind
from card.tools.bench.environment import MEASURED_START

_CLIENT = Path(__file__).with_name("sse_clients.py")
_NAME = "model"


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts answered once."""

    wall_s: float
    texts: list[str]
    num_tokens: int
    client_cpu_s: float = 0.0


async def closed_loop(concurrency: int, jobs: Sequence[Callable[[], Awaitable[None]]]) -> float:
    """Run all jobs, so many at a time; return the seconds that it took."""
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await job()

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return time.perf_counter() - started


async def run_directly(llm: AsyncLLM, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Run:
    """Answer the prompts to coroutines of this process."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=args.max_tokens, ignore_eos=True).resolved()
    texts = [""] * len(prompts)
    num_tokens = 0

    def job(idx: int) -> Callable[[], Awaitable[None]]:
        async def answer() -> None:
            nonlocal num_tokens
            async for chunk in llm.generate(prompts[idx], params):
                texts[idx] += chunk.text
                num_tokens += len(chunk.token_ids)

        return answer

    wall_s = await closed_loop(args.concurrency, [job(idx) for idx in range(len(prompts))])
    return Run(wall_s, texts, num_tokens)


async def run_over_http(port: int, prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> Run:
    """Answer the prompts to streaming clients in a process of their own."""
    body = {"model": _NAME, "temperature": 0, "seed": 0, "max_tokens": args.max_tokens, "ignore_eos": True}
    task = {
        "port": port,
        "concurrency": args.concurrency,
        "bodies": [{**body, "prompt": list(prompt), "stream": True} for prompt in prompts],
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(_CLIENT), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate(json.dumps(task).encode())
    if child.returncode:
        raise SystemExit(f"the clients failed with status {child.returncode}")
    answer = json.loads(out)
    return Run(answer["wall_s"], answer["texts"], args.max_tokens * len(prompts), answer["cpu_s"])


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both ways by turns and return the line of the result. Raises: CardError."""
    draft = None if args.method == "vanilla" else args.draft
    facts = options.describe_run()
    llm = AsyncLLM(
        args.target,
        draft,
        method=args.method,
        dtype=args.dtype,
        target_cost=args.target_cost,
        max_num_seqs=args.concurrency,
        **readable(MEASURED_START, args.method),
    )
    async with llm:
        settings = ServerSettings(port=0, served_model_names=(_NAME,))
        sock = bind(settings)
        config = ServerConfig(make_app(llm, settings), settings)
        server = Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        prompts = options.encode_prompts(args.prompts, args.limit, llm.host.tokenizer)
        ways: dict[str, Callable[[], Awaitable[Run]]] = {
            "direct": lambda: run_directly(llm, prompts, args),
            "http": lambda: run_over_http(sock.getsockname()[1], prompts, args),
        }
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for repeat in range(args.repeats + 1):  # the first is not counted
            for name in list(ways) if repeat % 2 else reversed(list(ways)):
                runs[name].append(await ways[name]())
        server.should_exit = True
        await serving
        target_cost = llm.target_cost
    return {**facts, **_line(args, runs, target_cost, len(prompts))}


def _line(args: argparse.Namespace, runs: dict[str, list[Run]], target_cost: str | None, count: int) -> dict[str, Any]:
    first = runs["direct"][0].texts
    counted = {name: each[1:] for name, each in runs.items()}
    median = {name: statistics.median(run.wall_s for run in each) for name, each in counted.items()}
    ratios = [http.wall_s / direct.wall_s for http, direct in zip(counted["http"], counted["direct"], strict=True)]
    return {
        "question": "what the HTTP server costs beyond the engine",
        "method": args.method,
        "target": args.target,
        "target_cost": target_cost,
        "dtype": args.dtype,
        "concurrency": args.concurrency,
        "num_prompts": count,
        "max_tokens": args.max_tokens,
        "new_tokens": runs["http"][0].num_tokens,
        "num_texts_differing": sum(
            any(run.texts[idx] != first[idx] for each in runs.values() for run in each) for idx in range(count)
        ),
        "wall_s": {name: [round(run.wall_s, 6) for run in each] for name, each in counted.items()},
        "client_cpu_s": [round(run.client_cpu_s, 3) for run in counted["http"]],
        "overhead": median["http"] / median["direct"] - 1,
        "overhead_range": [min(ratios) - 1, max(ratios) - 1],
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_model_options(parser)
    parser.add_argument("--limit", type=int, default=48, help="how many prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to this file")
    parser.add_argument("--target-cost", help="inflate the target to the price of so many parameters, such as 300M")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count, of each way (default: %(default)s)")
    parser.add_argument("--method", default="card", help="method of decoding (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    args = make_parser().parse_args(arguments)
    try:
        line = asyncio.run(measure(args))
    except CardError as error:
        print(f"server_overhead: error: {error}", file=sys.stderr)
        return 2
    options.append_lines(args.out, [line])
    walls = {name: statistics.median(each) for name, each in line["wall_s"].items()}
    low, high = line["overhead_range"]
    print(
        f"{line['num_texts_differing']} of {line['num_prompts']} texts differ; direct {walls['direct']:.2f} s, HTTP "
        f"{walls['http']:.2f} s: overhead {line['overhead']:+.1%} ({low:+.1%} to {high:+.1%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
