"""Count what heads of `card train eagle` earn beside plain decoding, `suffix` and a draft model.

    card train eagle --data gsm8k_train.jsonl --max-prompts 64 --out head
    python benchmarks/family/eagle.py --draft head --draft demo-draft --prompts gsm8k_test.jsonl --limit 12

Each draft writes a chain of so many tokens, which is verified in turns, greedy; `suffix` copies as many. Counts do not
depend on what else the machine does. A step is a target pass that verifies; its tokens are the accepted ones and one of
the target's own. Every text is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from counted_steps import share_to_depth, steps_of
from options import append_lines, describe_run, questions_of

from card import LLM


def rows_of(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the settings of each row, plain decoding first."""
    yield "plain", {"method": "vanilla"}
    yield "suffix", {"method": "suffix", "budget": args.tokens, "policy": "fixed"}
    for draft in args.draft:
        chain = {"num_speculative_tokens": args.tokens, "policy": "fixed"}
        yield Path(draft).name, {"draft": draft, "method": "sps", "placement": "inline", **chain}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the counts of each row for each file of prompts."""
    questions = {path.stem: questions_of(path, args.limit) for path in args.prompts}
    plain: dict[str, list[list[int]]] = {}
    for name, settings in rows_of(args):
        numbers = itertools.count()  # of requests: none is used again
        with LLM(args.target, dtype=args.dtype, max_model_len=args.max_model_len, **settings) as llm:
            for data, asked in questions.items():
                answers = [steps_of(llm, next(numbers), question, args.max_tokens) for question in asked]
                texts = [token_ids for _, token_ids in answers]
                assert texts == plain.setdefault(data, texts), "the text is that of plain decoding"
                steps = [count for counts, _ in answers for count in counts]
                yield {
                    "row": name,
                    "target": Path(args.target).name,
                    "data": data,
                    "prompts": len(asked),
                    "steps": len(steps),
                    "tokens a step": round(1 + sum(steps) / len(steps), 3),
                    "accepted to depth": share_to_depth(steps, args.tokens),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--draft", action="append", default=[], help="a head or a draft model; several are compared")
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="JSON lines with a question each")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of a prompt, at most")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4, help="of a chain")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    for counted in measure(args):
        line = {**counted, **describe_run()}
        print(json.dumps(line), flush=True)
        if args.out is not None:
            append_lines(args.out, [line])


if __name__ == "__main__":
    main()
