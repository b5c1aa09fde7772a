"""Does a router of steps know when the target is needed? Answers that are right, or stay, over the target's tokens.

Each question of a file in GSM8K's form is answered greedily by step-wise routing, with every router at every knob; a
knob of 0 is plain decoding. RSD takes the share of right equations as its reward. The oracle checks results against the
file's solutions, so that it bounds what a router could do; chance is the other bound. One line of JSON for each router
and knob, with 95 % intervals by Wilson.

    python benchmarks/labs/arbitrage.py --prompts benchmarks/data/easy.jsonl --limit 12 --max-tokens 96 \\
        --out benchmarks/results/arbitrage.jsonl

``easy.jsonl`` holds the problems of `card demo`, which the built-in target solves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options
from word_problems import Item, read_items

from card.api.llm import LLM
from card.config import SamplingParams
from card.errors import CardError
from card.labs.steps.rewards import Reward
from card.labs.steps.routers import Router
from card.steps import Arbitrage, RandomRouter, SolutionReward, equations_hold, parse_router
from card.text.answers import final_number
from card.tools.bench.summary import Share

DEFAULT = "random:0,random:0.25,random:0.5,random:0.75,random:1,entropy:0.5,entropy:1,entropy:2,reward:0.3,oracle:1"


def parse(text: str, oracle: Reward = equations_hold) -> list[tuple[str, Router]]:
    """Return the routers of "random:0.5,router.safetensors" with their names. Raises: CardError."""
    return [(Path(one.partition(":")[0]).name, parse_router(one, oracle)) for one in text.split(",")]


def solutions_of(path: Path) -> SolutionReward:
    """Return the checker of a file that `read_items` reads: a bound for the oracle, which nobody has who asks."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return SolutionReward({str(one["question"]): str(one["answer"]) for one in records})


def run(
    target: LLM, draft: LLM, items: Sequence[Item], routers: Sequence[tuple[str, Router]], max_tokens: int
) -> list[dict[str, Any]]:
    """Return a line for each router and knob. Raises: CardError."""
    params, questions = (
        SamplingParams(temperature=0.0, max_tokens=max_tokens).resolved(),
        [item.question for item in items],
    )
    exact = Arbitrage(target, draft, RandomRouter(0.0)).answer(questions, params)
    lines = []
    for name, router in routers:
        outputs = Arbitrage(target, draft, router).answer(questions, params)
        numbers = [final_number(output.text) for output in outputs]
        plain = [final_number(output.text) for output in exact]
        steps = [step for output in outputs for step in output.steps]
        solved = Share(sum(n == item.answer for n, item in zip(numbers, items, strict=True)), len(items))
        same = Share(sum(n == p for n, p in zip(numbers, plain, strict=True)), len(items))
        totals = {n: sum(getattr(o, n) for o in outputs) for n in ("target_tokens", "target_passes", "draft_tokens")}
        lines.append(
            {
                "benchmark": "arbitrage",
                "router": name,
                "knob": router.knob,
                "exact": outputs[0].exact,
                "num_items": len(items),
                "num_solved": solved.count,
                "solved_interval": solved.interval,
                "num_same_number": same.count,
                "same_number_interval": same.interval,
                "num_tokens": sum(len(output.token_ids) for output in outputs),
                **totals,
                "num_steps": len(steps),
                "num_target_steps": sum(step.writer == "target" for step in steps),
            }
        )
        print(
            f"{name}:{router.knob:g}  solved {solved}  same number {same}  steps of the target "
            f"{lines[-1]['num_target_steps']} of {len(steps)}  target tokens {totals['target_tokens']}  "
            f"passes {totals['target_passes']}",
            flush=True,
        )
    return lines


def main() -> None:
    """Answer the questions with every router, and print and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo-target", help="default: %(default)s")
    parser.add_argument("--draft", default="demo-draft", help="default: %(default)s")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines as in GSM8K: question and answer")
    parser.add_argument("--limit", type=int, default=24, help="how many items (default: %(default)s)")
    parser.add_argument("--routers", default=DEFAULT, help="or files of card train router (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="most new tokens (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file to append a line of JSON for each router and knob to")
    args = parser.parse_args()
    try:
        items = read_items(args.prompts, args.limit)
        routers = parse(args.routers, solutions_of(args.prompts))
        facts = {**options.describe_run(), "target": args.target, "draft": args.draft, "prompts": args.prompts.name}
        speculating = {"method": "sps", "placement": "inline", "policy": "fixed"}
        with (
            LLM(args.target, args.draft, dtype="float32", **speculating) as target,
            LLM(args.draft, dtype="float32", method="vanilla") as draft,
        ):
            lines = run(target, draft, items, routers, args.max_tokens)
        if args.out:
            options.append_lines(args.out, [{**line, **facts} for line in lines])
    except CardError as error:
        raise SystemExit(f"arbitrage.py: {error}") from None


if __name__ == "__main__":
    main()
