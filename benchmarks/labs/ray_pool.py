"""How fast are targets that share a pool of drafters on Ray Serve, beside what `card plan --pool` says?

As many requests are answered at once as there are targets, each by a target of its own. Texts are those of a recording,
and every answer is compared with it. Plan and measurement have the same texts; the plan knows profiles and no run.

On one machine targets, drafters and Ray share the cores. The plan gives each target and each drafter hardware of its
own, so it holds as far as there are cores; what comes below it beyond them is the machine and not the pool.

    make test-ray                                    # sets up .venv-ray
    card profile demo-target --target-cost 90M --dtype float32 --threads 1 --out target.json
    card profile demo-draft --dtype float32 --threads 1 --out draft.json
    card record --dtype float32 --max-tokens 96 --out pair.rec
    .venv-ray/bin/python benchmarks/labs/ray_pool.py --target-profile target.json --draft-profile draft.json \\
        --recording pair.rec --target-cost 90M --targets 1,2,4 --drafters 1 --out benchmarks/results/ray_pool.jsonl
    python benchmarks/labs/ray_pool.py --table benchmarks/results/ray_pool.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import httpx2
import options
from pages import markdown

from card.errors import BenchError, CardError
from card.models.loading import load_tokenizer
from card.text.tokens import decode
from card.tools.planner.pool import PoolStudy, make_pool_study
from card.tools.planner.profile import load_profile
from card.tools.planner.recording import Recording, load_recording
from card.tools.planner.requests import PoolRequest
from card.tools.planner.scenario import Scenario

BENCHMARK = "ray_pool"
_PORT = 8123
_READY_S = 120.0


@dataclass(slots=True)
class Measured:
    """What all clients of one pool saw."""

    tokens_per_s: list[float] = field(default_factory=list)  # of each request while it is decoded
    num_tokens: int = 0
    accepted_tokens: int = 0
    texts_apart: int = 0
    wall_s: float = 0.0


def plan(args: argparse.Namespace, recording: Recording) -> PoolStudy:
    """Return what `card plan --pool --loads 1` says of targets that always have a request."""
    scenario = Scenario(
        target=load_profile(args.target_profile), draft=load_profile(args.draft_profile), recording=recording, cores=1
    )
    return make_pool_study(scenario, PoolRequest(loads=(1.0,), max_targets=max(args.targets)))


def planned_tokens_per_s(study: PoolStudy, num_targets: int, num_drafters: int) -> float:
    """Return the plan's speed of a request where so many targets share so many drafters evenly."""
    each = math.ceil(num_targets / num_drafters)
    return next(run.tokens_per_s for run in study.points[0].runs if run.num_targets == each)


def measure(url: str, recording: Recording, num_targets: int, num_requests: int, *, speculates: bool) -> Measured:
    """Let so many clients ask one question after the other, all together ``num_requests``."""
    texts = [text for text in recording.texts if len(text.token_ids) > 1]
    tokenizer = load_tokenizer(recording.target)
    expected = [decode(tokenizer, text.token_ids, after=text.prompt_ids) for text in texts]
    found, lock, numbers = Measured(), threading.Lock(), iter(range(num_requests))

    def client() -> None:
        with httpx2.Client(timeout=300.0) as http:
            while (number := next_number()) is not None:
                text = texts[number % len(texts)]
                body = {"prompt": list(text.prompt_ids), "max_tokens": len(text.token_ids), "temperature": 0}
                body |= {"include_metrics": True, "speculation": "on" if speculates else "off"}
                answer = http.post(f"{url}/v1/completions", json=body).raise_for_status().json()
                with lock:
                    stats = answer["metrics"]["card"]
                    found.tokens_per_s.append(answer["metrics"]["tokens_per_second"])
                    found.num_tokens += answer["usage"]["completion_tokens"]
                    found.accepted_tokens += stats["accepted_tokens"]
                    found.texts_apart += answer["choices"][0]["text"] != expected[number % len(texts)]

    def next_number() -> int | None:
        with lock:
            return next(numbers, None)

    started = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(num_targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.wall_s = time.perf_counter() - started
    if len(found.tokens_per_s) != num_requests:
        raise BenchError(f"{num_requests - len(found.tokens_per_s)} of {num_requests} requests had no answer")
    return found


class Pool:
    """An application of targets and drafters on a Ray of this machine alone."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # addresses and ports stay on 127.0.0.1
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"  # Serve binds a port of each replica to all addresses
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray reads it once
        import ray
        from ray import serve

        from card.ray import app

        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": _PORT})
        serve.run(app(dict(args)))
        self._ray, self._serve = ray, serve

    def wait_for(self, num_drafters: int) -> None:
        """Wait until all drafters are known. Raises: BenchError."""
        desk = self._serve.get_deployment_handle("LeaseDesk", "default")
        deadline = time.monotonic() + _READY_S
        while json.loads(desk.figures.remote().result())["drafters"] < num_drafters:
            if time.monotonic() > deadline:
                raise BenchError(f"there are no {num_drafters} drafters after {_READY_S:g} s")
            time.sleep(0.2)

    def close(self) -> None:
        """End it."""
        self._serve.shutdown()
        self._ray.shutdown()


def measure_pool(args: argparse.Namespace, recording: Recording, num_targets: int, num_drafters: int) -> dict[str, Any]:
    """Return the facts of one pool for a line of the results."""
    settings = {
        "target": recording.target,
        "draft": recording.draft,
        "dtype": recording.dtype,
        **({"target_cost": args.target_cost} if args.target_cost else {}),
        "threads": 1,
        "max_num_seqs": 1,
        "min_targets": num_targets,
        "max_targets": num_targets,
        "min_drafters": num_drafters,
        "max_drafters": num_drafters,
        "target_resources": {"num_cpus": 1},
        "drafter_resources": {"num_cpus": 1},
    }
    with closing(Pool(settings)) as pool:
        pool.wait_for(num_drafters)
        url = f"http://127.0.0.1:{_PORT}"
        measure(url, recording, num_targets, args.warm_up * num_targets, speculates=True)
        with_pool = measure(url, recording, num_targets, args.requests * num_targets, speculates=True)
        plain = measure(url, recording, num_targets, args.requests * num_targets, speculates=False)
    return {
        "targets": num_targets,
        "drafters": num_drafters,
        "target_cost": args.target_cost,
        "requests": len(with_pool.tokens_per_s),
        "tokens_per_s": round(statistics.fmean(with_pool.tokens_per_s), 2),
        "range": [round(min(with_pool.tokens_per_s), 2), round(max(with_pool.tokens_per_s), 2)],
        "all_tokens_per_s": round(with_pool.num_tokens / with_pool.wall_s, 2),
        "plain_tokens_per_s": round(statistics.fmean(plain.tokens_per_s), 2),
        "accepted_tokens": with_pool.accepted_tokens,
        "num_tokens": with_pool.num_tokens,
        "texts_apart": with_pool.texts_apart + plain.texts_apart,
    }


def table(path: Path) -> str:
    """Return the lines of a file as a Markdown table."""
    columns = ["targets", "drafters", "cores", "tokens/s", "planned", "plain", "plain, planned", "texts apart"]
    rows = [
        [
            str(line["targets"]),
            str(line["drafters"]),
            str(line["machine"]["cores"]),
            f"{line['tokens_per_s']:.0f} ({line['tokens_per_s'] / line['plain_tokens_per_s']:.2f}x)",
            f"{line['planned_tokens_per_s']:.0f} "
            f"({line['planned_tokens_per_s'] / line['planned_plain_tokens_per_s']:.2f}x)",
            f"{line['plain_tokens_per_s']:.0f}",
            f"{line['planned_plain_tokens_per_s']:.0f}",
            f"{line['texts_apart']} of {2 * line['requests']}",
        ]
        for line in options.read_lines(path, BENCHMARK)
    ]
    return markdown(columns, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-profile", help="of card profile, with one thread")
    parser.add_argument("--draft-profile", help="the same of the draft model")
    parser.add_argument("--recording", type=Path, help="of card record: the texts")
    parser.add_argument("--target-cost", help="price of the target as in its profile, such as 90M")
    parser.add_argument("--targets", type=options.numbers, default=[1, 2, 4], help="requests at once (default: 1,2,4)")
    parser.add_argument("--drafters", type=options.numbers, default=[1, 2], help="drafters (default: 1,2)")
    parser.add_argument("--requests", type=int, default=12, help="of each target (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=6, help="requests before, of each target (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    parser.add_argument("--table", type=Path, help="measure nothing; print the table of this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pools of all sizes asked for, or print a table."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.table is not None:
        print(table(args.table))
        return 0
    if None in (args.target_profile, args.draft_profile, args.recording, args.out):
        parser.error("give --target-profile, --draft-profile, --recording and --out, or --table")
    try:
        recording = load_recording(args.recording)
        study = plan(args, recording)
        for num_drafters in args.drafters:
            for num_targets in args.targets:
                line = {
                    "benchmark": BENCHMARK,
                    **measure_pool(args, recording, num_targets, num_drafters),
                    "planned_tokens_per_s": round(planned_tokens_per_s(study, num_targets, num_drafters), 2),
                    "planned_plain_tokens_per_s": round(study.plain_tokens_per_s, 2),
                    **options.describe_run(),
                }
                options.append_lines(args.out, [line])
                print(json.dumps({name: line[name] for name in list(line)[1:13]}), flush=True)
    except CardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
