"""What the plug-in earns inside vLLM, beside vLLM's own ways to speculate, on the same cores in total.

Every row is one vLLM, loaded once, in a process of its own. All rows are asked in turn, repeat by repeat, so that a
neighbour on the machine meets all of them; only ratios within one run count. Plain decoding and vLLM's own proposers
compute on all cores. With CARD vLLM computes on all but the last one, which is the drafter's. Texts are compared with
those of the plain row: in bfloat16 they may part where two tokens nearly tie.

    make test-vllm                                       # sets up .venv-vllm
    .venv-vllm/bin/python benchmarks/inside/vllm_plugin.py --target-cost 90M --out benchmarks/results/vllm_90M.jsonl
    .venv-vllm/bin/python benchmarks/inside/vllm_plugin.py --table benchmarks/results/vllm_90M.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options
from pages import markdown

from card.backends.transformers.loading import load_model
from card.config import parse_parameter_count
from card.models.inflation import inflate
from card.models.loading import load_tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets

BENCHMARK = "vllm_plugin"
_WARM_UP_TOKENS = 24
_CONTEXT = 1024
_MOST_AT_ONCE = 16
_IOMP = Path(sys.prefix) / "lib" / "libiomp5.so"  # without it vLLM says that speculation on a CPU is slow


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run vLLM."""

    name: str
    speculation: Mapping[str, Any] | None = None
    card: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Timed:
    """One measurement."""

    wall_s: float
    num_tokens: int
    num_steps: int
    texts: list[list[int]] = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


def make_rows(draft: str, lengths: Sequence[int], cores: Sequence[int]) -> list[Row]:
    """Return the rows, plain decoding first."""
    ngram = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 6}
    plugin = {"method": "custom_class", "model": "card.vllm.CardProposer", "num_speculative_tokens": 12}
    suffix = {"method": "suffix", "num_speculative_tokens": 8}
    suffix["suffix_decoding_max_cached_requests"] = 0  # the same questions come again: it would copy its own answers
    rows = [Row("plain"), Row("ngram", ngram), Row("suffix", suffix)]
    rows += [Row(f"draft-{n}", {"method": "draft_model", "model": draft, "num_speculative_tokens": n}) for n in lengths]
    rows.append(Row("card", plugin, {"draft": draft, "draft_dtype": "int8", "draft_cores": [cores[-1]]}))
    rows.append(Row("card in turns", plugin, {"draft": draft, "draft_dtype": "int8", "schedule": "turns"}))
    rows.append(Row("card without a draft", plugin, {}))
    return rows


# ---- the worker -----------------------------------------------------------------------------------------------------


def work(job: Mapping[str, Any]) -> None:
    """Load vLLM, then answer one question a line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    os.sched_setaffinity(0, job["cores"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=_CONTEXT,
        max_num_seqs=_MOST_AT_ONCE,
        enable_prefix_caching=False,
        speculative_config=job["speculation"],
        additional_config={"card": job["card"]} if job["card"] is not None else {},
    )
    engine: Any = llm.llm_engine
    names = itertools.count()
    print(json.dumps({"loaded": True}), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=question["max_tokens"], ignore_eos=True, detokenize=False)
        waiting = list(enumerate(question["prompts"]))
        place: dict[str, int] = {}
        texts: list[list[int]] = [[] for _ in waiting]
        began, num_steps = time.perf_counter(), 0
        while waiting or engine.has_unfinished_requests():
            while waiting and engine.get_num_unfinished_requests() < question["at_once"]:
                idx, prompt_ids = waiting.pop(0)
                name = str(next(names))
                place[name] = idx
                engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)
            for output in engine.step():
                texts[place[output.request_id]] = list(output.outputs[0].token_ids)
            num_steps += 1
        wall_s = time.perf_counter() - began
        print(json.dumps({"wall_s": wall_s, "num_steps": num_steps, "texts": texts}), file=answers)


class Worker:
    """The parent's side of one row."""

    def __init__(self, row: Row, target: str, args: argparse.Namespace, cores: Sequence[int]) -> None:
        """Start to load it."""
        uses_drafter = row.card is not None and "draft_cores" in row.card
        own = list(cores[:-1]) if uses_drafter else list(cores)
        job = {
            "target": target,
            "dtype": args.dtype,
            "cores": own,
            "speculation": row.speculation,
            "card": row.card,
        }
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(len(own)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            **({"LD_PRELOAD": str(_IOMP)} if _IOMP.is_file() else {}),
        }
        self.row, self.num_cores = row, len(own)
        log = Path(args.log) / f"vllm-{row.name.replace(' ', '-').replace(',', '')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
            )

    def is_loaded(self) -> bool:
        """Wait until it is loaded; False if it cannot be."""
        assert self._process.stdout is not None
        return bool(self._process.stdout.readline())

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int) -> Timed:
        """Return what it took to decode the prompts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"prompts": prompts, "max_tokens": max_tokens, "at_once": at_once}),
            file=self._process.stdin,
            flush=True,
        )
        answer = json.loads(self._process.stdout.readline())
        return Timed(answer["wall_s"], sum(map(len, answer["texts"])), answer["num_steps"], answer["texts"])

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()


# ---- the parent -----------------------------------------------------------------------------------------------------


def save_demo(name: str, cost: str | None, folder: Path) -> str:
    """Return a model of the built-in pair as an ordinary folder, perhaps inflated, made if it is not there."""
    place = folder / (f"{name}-{cost}" if cost else name)
    if not (place / "tokenizer.json").is_file():
        model = load_model(name)
        (inflate(model, parse_parameter_count(cost)) if cost else model).save_pretrained(place)
        load_tokenizer(name).save(place)
    return str(place)


def load_rows(args: argparse.Namespace, target: str, draft: str, cores: Sequence[int]) -> list[Worker]:
    """Load the rows one after another; those that vLLM cannot load are left out, with a line that says so."""
    workers: list[Worker] = []
    for row in make_rows(draft, options.numbers(args.lengths), cores):
        if args.rows and row.name not in args.rows.split(","):
            continue
        worker = Worker(row, target, args, cores)
        if worker.is_loaded():
            print(f"loaded {row.name} on {worker.num_cores} cores", flush=True)
            workers.append(worker)
        else:
            print(f"left out {row.name}: vLLM does not load it here, see its log in {args.log}", flush=True)
            worker.close()
    return workers


def measure(
    args: argparse.Namespace, workers: Sequence[Worker], prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Return one line for each row and concurrency."""
    lines: list[dict[str, Any]] = []
    for at_once in options.numbers(args.concurrency):
        timed: dict[str, list[Timed]] = {worker.row.name: [] for worker in workers}
        for worker in workers:
            worker.ask(prompts[:at_once], _WARM_UP_TOKENS, at_once)
        batch = [*prompts] * max(1, -(-at_once // len(prompts)))  # at least as many as run at once
        for repeat in range(args.repeats):
            order = workers if repeat % 2 == 0 else workers[::-1]
            for worker in order:
                timed[worker.row.name].append(worker.ask(batch, args.max_tokens, at_once))
        plain = timed["plain"][0].texts if "plain" in timed else None
        for worker in workers:
            runs = timed[worker.row.name]
            rates = [run.tokens_per_s for run in runs]
            lines.append(
                {
                    "benchmark": BENCHMARK,
                    "row": worker.row.name,
                    "at_once": at_once,
                    "target": args.target_cost,
                    "prompts": args.prompts,
                    "dtype": args.dtype,
                    "cores": worker.num_cores,
                    "num_prompts": len(batch),
                    "max_tokens": args.max_tokens,
                    "tokens_per_s": rates,
                    "tokens_per_step": statistics.mean(run.num_tokens / run.num_steps for run in runs),
                    "ratios": [rate / timed["plain"][idx].tokens_per_s for idx, rate in enumerate(rates)]
                    if plain is not None
                    else [],
                    "texts_apart": sum(a != b for a, b in zip(runs[0].texts, plain or runs[0].texts, strict=True)),
                }
            )
            print(f"{at_once} at once, {worker.row.name}: {statistics.median(rates):.0f} tokens/s", flush=True)
    return lines


def print_table(path: Path) -> None:
    """Print a table of the lines in a file."""
    lines = options.read_lines(path, BENCHMARK)
    rows = [
        [
            line["target"] or "as it is",
            line["prompts"],
            str(line["at_once"]),
            line["row"],
            f"{statistics.median(line['tokens_per_s']):.0f}",
            f"{statistics.median(line['ratios']):.2f}" if line["ratios"] else "",
            f"{min(line['ratios']):.2f}–{max(line['ratios']):.2f}" if line["ratios"] else "",
            f"{line['tokens_per_step'] / line['at_once']:.2f}",
            f"{line['texts_apart']} of {line['num_prompts']}",
        ]
        for line in lines
    ]
    titles = ["target", "prompts", "at once", "row", "tokens/s", "/ plain", "range", "tokens a step", "texts apart"]
    print(markdown(titles, rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-cost", default="90M", help="price of the built-in target (default: %(default)s)")
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFT"), help="folders of models instead of these")
    parser.add_argument("--prompts", default="questions", help="as --data of card bench (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--lengths", default="4,6", help="draft lengths of vLLM's own draft model")
    parser.add_argument("--rows", default="", help="names with commas; default: all")
    parser.add_argument("--limit", type=int, default=8, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", type=Path, default=Path("build/vllm"), help="folder for the exported pair")
    parser.add_argument("--log", default="build/vllm/logs", help="folder for what vLLM prints")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm.jsonl"))
    parser.add_argument("--table", type=Path, help="only print the table of this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        work(json.loads(args.worker))
        return 0
    if args.table:
        print_table(args.table)
        return 0
    facts = options.describe_run()
    if args.pair:
        target, draft = (str(Path(folder).absolute()) for folder in args.pair)
        args.target_cost = Path(target).name
    else:
        target = save_demo("demo-target", args.target_cost, args.models.absolute())
        draft = save_demo("demo-draft", None, args.models.absolute())
    (dataset,) = read_datasets([parse_spec(args.prompts)], limit=args.limit)
    tokenizer = load_tokenizer(target)
    prompts = [question.encode(tokenizer) for question in dataset.questions]
    cores = sorted(os.sched_getaffinity(0))
    workers = load_rows(args, target, draft, cores)
    try:
        lines = measure(args, workers, prompts)
    finally:
        for worker in workers:
            worker.close()
    options.append_lines(args.out, [{**line, **facts} for line in lines])
    print_table(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
