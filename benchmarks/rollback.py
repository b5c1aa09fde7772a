"""How many drafted tokens are rolled back by the methods of rounds, and does a predictor of rejections help?

PEARL, SSD and SpecBranch decode the same prompts with drafts of equal length, SpecBranch by the drafter's confidence
alone and with H-RAD. Rolled back is what was drafted on the path that seemed likeliest and was not chosen; nodes beside
it, which SpecBranch and SSD prepare, are counted apart. All rows decode a prompt before the next one comes.

    python benchmarks/rollback.py --prompts FILE.jsonl --limit 16 --max-tokens 96 --target-cost 90M --dtype bfloat16 \\
        --lengths 6,10 --out benchmarks/results/rollback.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import options
from rich.console import Console
from table import markdown

from card import LLM, SamplingParams
from card.bench.environment import MEASURED_START
from card.errors import CardError
from card.models.loading import load_tokenizer
from card.workers.metrics import RequestStats

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One way to decode."""

    name: str
    method: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer."""

    token_ids: tuple[int, ...]
    stats: RequestStats


def make_rows(lengths: Sequence[int], branch_below: Sequence[float], hrad: str) -> list[Row]:
    """Return the rows of each draft length; length 0 is what the measured latencies say."""
    rows = []
    for length in lengths:
        drafts: dict[str, Any] = {"num_speculative_tokens": length} if length else {}
        rows += [Row("pearl", "pearl", drafts), Row("ssd", "ssd", drafts)]
        rows.append(Row("specbranch", "specbranch", {"hrad": "off", **drafts}))
        if hrad != "off":
            rows.append(Row("specbranch, H-RAD", "specbranch", {"hrad": hrad, **drafts}))
        for below in branch_below:
            settings = {"hrad": "off", "branch_below": below, **drafts}
            rows.append(Row(f"specbranch, below {below:g}", "specbranch", settings))
    return rows


def decode(llm: LLM, prompt_ids: Sequence[int], max_tokens: int) -> Decoded:
    """Answer one prompt greedily. Raises: CardError, as the request failed."""
    (output,) = llm.generate([list(prompt_ids)], SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens))
    if output.error is not None:
        raise output.error
    return Decoded(output.outputs[0].token_ids, output.stats)


def measure(
    args: argparse.Namespace, rows: Sequence[Row], prompts: Sequence[Sequence[int]], console: Console
) -> list[dict[str, Any]]:
    """Decode every prompt with all rows, and return one line for each row."""
    target_core, draft_core = options.two_cores(args.cores)
    common: dict[str, Any] = {
        "policy": "fixed",
        "placement": "process",
        "cores": (target_core,),
        "draft_cores": (draft_core,),
        "threads": 1,
        **MEASURED_START,
    }
    model, tokenizer = options.load_target(args.target, args.dtype, args.target_cost), load_tokenizer(args.target)
    done: list[list[list[Decoded]]] = [[[] for _ in range(args.repeats)] for _ in rows]
    with contextlib.ExitStack() as stack:
        llms = []
        for row in rows:
            settings = {"tokenizer": tokenizer, "dtype": args.dtype, **common, **row.settings}
            llms.append(stack.enter_context(LLM(model, args.draft, method=row.method, **settings)))
            decode(llms[-1], prompts[0], _WARM_UP_TOKENS)
        for repeat in range(args.repeats):
            for idx, prompt_ids in enumerate(prompts):
                console.print(f"repeat {repeat + 1}, prompt {idx + 1} of {len(prompts)}")
                order = [(idx + offset) % len(rows) for offset in range(len(rows))]  # none is always the first
                for row_idx in order:
                    done[row_idx][repeat].append(decode(llms[row_idx], prompt_ids, args.max_tokens))
        lengths = [llm.draft_settings.num_speculative_tokens for llm in llms]
    return [
        {"row": row.name, "num_speculative_tokens": length, **row.settings, **figures(own, done[0])}
        for row, length, own in zip(rows, lengths, done, strict=True)
    ]


def figures(runs: Sequence[Sequence[Decoded]], reference: Sequence[Sequence[Decoded]]) -> dict[str, Any]:
    """Return what one row cost, and how many of its texts are those of the reference, near-ties not told apart."""
    decoded = [one for run in runs for one in run]
    stats = [one.stats for one in decoded]
    tokens, passes = sum(one.num_new_tokens - 1 for one in stats), sum(one.target_passes for one in stats)
    rolled_back = sum(one.rolled_back_tokens for one in stats)
    accepted = sum(one.accepted_tokens for one in stats)
    dropped = sum(one.drafter_dropped_nodes for one in stats)
    rates = [sum(d.stats.num_new_tokens - 1 for d in run) / sum(d.stats.decode_s for d in run) for run in runs]
    pairs = zip(decoded, (one for run in reference for one in run), strict=True)
    return {
        "num_prompts": len(runs[0]),
        "repeats": len(runs),
        "num_texts_equal": sum(one.token_ids == other.token_ids for one, other in pairs),
        "tokens": tokens,
        "target_passes": passes,
        "mean_acceptance_length": round(1 + accepted / passes, 3),
        "rolled_back_tokens": rolled_back,
        "dropped_nodes": dropped,
        "rolled_back_per_token": round(rolled_back / tokens, 3),
        "rolled_back_share": round(rolled_back / (rolled_back + accepted), 3),
        "dropped_per_token": round(dropped / tokens, 2),
        "hit_rate": round(sum(one.hits + one.late_hits for one in stats) / passes, 3),
        "waited_share": round(sum(one.waited_s for one in stats) / sum(one.decode_s for one in stats), 3),
        "tokens_per_s": [round(rate, 1) for rate in rates],
        "drafter_restarts": sum(one.drafter_restarts for one in stats),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as a Markdown table."""
    names = {
        "row": "method",
        "num_speculative_tokens": "length",
        "mean_acceptance_length": "tokens a pass",
        "rolled_back_per_token": "rolled back per token",
        "rolled_back_share": "of those drafted on the likeliest path",
        "dropped_per_token": "nodes dropped per token",
        "hit_rate": "hit rate",
        "waited_share": "time waited",
    }
    rows = [[*(str(line[name]) for name in names), f"{statistics.median(line['tokens_per_s']):.1f}"] for line in lines]
    return markdown([*names.values(), "tokens/s"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_common_options(parser)
    parser.add_argument("--lengths", type=options.numbers, default=[0], help="draft lengths; 0: from latencies")
    parser.add_argument("--branch-below", type=float, nargs="*", default=[], help="further thresholds of specbranch")
    parser.add_argument("--hrad", default="demo", help="predictor: a file, demo, or off (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    run = options.describe_run()
    try:
        prompts = options.encode_prompts(args.prompts, args.limit, load_tokenizer(args.target))
        lines = measure(args, make_rows(args.lengths, args.branch_below, args.hrad), prompts, console)
    except CardError as error:
        console.print(f"rollback.py: error: {error}")
        return 2
    shared = {"benchmark": "rollback", "target": args.target, "draft": args.draft, "target_cost": args.target_cost}
    shared |= {"dtype": args.dtype, "max_tokens": args.max_tokens, "temperature": 0.0, "seed": 0}
    options.append_lines(args.out, [{**shared, **line, **run} for line in lines])
    Console().print(table(lines), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
