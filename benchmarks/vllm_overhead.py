"""What the plug-in takes of each of vLLM's steps, measured without vLLM: time inside `propose`, beside a real drafter.

The built-in target's texts are decoded beforehand. Then they are played to the proposer as an engine would: a pause for
the pass, the tokens that such a text confirms of each chain and one more, `propose`. Time is told twice: as it passed,
and as the processor time of the calling thread, in which waiting for a busy machine does not count.

    python benchmarks/vllm_overhead.py --out benchmarks/results/vllm_overhead.jsonl
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import options

from card import LLM, SamplingParams
from card.inside.adapters import AdapterSettings, ChainProposer, make_proposer
from card.inside.adapters.tracking import Tokens
from card.models.loading import load_tokenizer
from card.tools.bench.datasets import parse_spec, read_datasets

_PASS_S = {1: 0.010, 4: 0.018, 16: 0.045}  # of vLLM with the 90 M target on one core, about
_WARM_UP_STEPS = 20
_MOST = 8


@dataclass(slots=True)
class Played:
    """Times of the steps in which no text began, in milliseconds, and of those in which texts did."""

    wall_ms: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    begin_ms: list[float] = field(default_factory=list)
    num_proposed: int = 0
    num_accepted: int = 0


def play(
    proposer: ChainProposer, texts: Sequence[Sequence[int]], starts: Sequence[int], batch: int, pass_s: float
) -> Played:
    """Decode each text from its start on, ``batch`` at once."""
    played = Played()
    waiting = list(range(len(texts)))
    longest = max(map(len, texts)) + _MOST + 1
    rows: list[int] = []
    lengths: list[int] = []
    chains: list[list[int]] = []
    while rows or waiting:
        is_new = len(rows) < batch and bool(waiting)
        while len(rows) < batch and waiting:
            rows.append(waiting.pop(0))
            lengths.append(starts[rows[-1]])
            chains.append([])
        time.sleep(pass_s)
        new_ids: list[list[int]] = []
        for row, name in enumerate(rows):
            text, length = texts[name], lengths[row]
            right = 0
            while right < len(chains[row]) and length + right < len(text) - 1:
                if chains[row][right] != text[length + right]:
                    break
                right += 1
            new_ids.append(list(text[length : length + right + 1]))
            lengths[row] += len(new_ids[-1])
            played.num_accepted += right
        tokens: Tokens = np.zeros((batch, longest), np.int32)
        for row, name in enumerate(rows):
            tokens[row, : lengths[row]] = texts[name][: lengths[row]]
        wall, busy = time.perf_counter(), time.thread_time()
        chains = proposer.propose(new_ids, lengths, tokens)
        wall, busy = time.perf_counter() - wall, time.thread_time() - busy
        played.num_proposed += sum(map(len, chains))
        if is_new:
            played.begin_ms.append(1e3 * wall)
        else:
            played.wall_ms.append(1e3 * wall)
            played.busy_ms.append(1e3 * busy)
        kept = [row for row, name in enumerate(rows) if lengths[row] < len(texts[name])]
        rows, lengths, chains = ([part[row] for row in kept] for part in (rows, lengths, chains))  # type: ignore[assignment]
    return played


def measure(
    batch: int, texts: Sequence[Sequence[int]], starts: Sequence[int], cores: tuple[int, ...], vocab_size: int
) -> dict[str, Any]:
    """Return one line of results for a batch size."""
    settings = AdapterSettings(draft="demo-draft", draft_cores=cores or None)
    proposer = make_proposer(
        settings,
        vocab_size=vocab_size,
        max_model_len=1024,
        num_speculative_tokens=_MOST,
        tokenizer=None,
    )
    try:
        played = play(proposer, texts, starts, batch, _PASS_S[batch])
    finally:
        proposer.close()
    wall, busy = sorted(played.wall_ms[_WARM_UP_STEPS:]), sorted(played.busy_ms[_WARM_UP_STEPS:])
    return {
        "benchmark": "vllm_overhead",
        "batch": batch,
        "steps": len(wall),
        "pass_ms": 1e3 * _PASS_S[batch],
        "wall_ms_median": statistics.median(wall),
        "wall_ms_p90": wall[int(0.9 * len(wall))],
        "busy_ms_median": statistics.median(busy),
        "busy_ms_p90": busy[int(0.9 * len(busy))],
        "begin_ms_median": statistics.median(played.begin_ms),
        "accepted_per_proposed": played.num_accepted / max(1, played.num_proposed),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,16", help="batch sizes, of 1, 4 and 16 (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=2, help="how often the texts are played (default: %(default)s)")
    parser.add_argument("--draft-cores", default="", help="cores of the drafter, such as 1; default: anywhere")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_overhead.jsonl"))
    args = parser.parse_args(argv)
    facts = options.describe_run()
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    (prompts,) = read_datasets([parse_spec("questions")], limit=None)
    tokenizer = load_tokenizer("demo-target")
    encoded = [question.encode(tokenizer) for question in prompts.questions]
    with LLM("demo-target") as llm:
        results = llm.generate(encoded, params)
    texts = [[*ids, *result.outputs[0].token_ids] for ids, result in zip(encoded, results, strict=True)]
    starts = [len(ids) for ids in encoded]
    cores = tuple(options.numbers(args.draft_cores)) if args.draft_cores else ()
    if cores:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - set(cores))  # as vLLM binds its own threads
    for batch in options.numbers(args.batch):
        line = measure(batch, texts * args.repeats, starts * args.repeats, cores, len(tokenizer))
        options.append_lines(args.out, [{**line, **facts}])
        shown = ", ".join(f"{name} {value:.3f}" for name, value in line.items() if name.endswith(("median", "p90")))
        print(f"batch {batch}: {line['steps']} steps, {shown}, accepted {line['accepted_per_proposed']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
