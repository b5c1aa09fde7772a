"""Count what heads of `card train ctc` earn: tokens a step of each, and acceptance by depth.

    card train ctc --data gsm8k_train.jsonl --max-prompts 500 --max-tokens 96 --out ctc.safetensors
    card train ctc --data gsm8k_train.jsonl --max-prompts 500 --max-tokens 96 --loss cross-entropy --out ce.safetensors
    python benchmarks/family/ctc.py --head ctc.safetensors --head ce.safetensors --prompts gsm8k_test.jsonl --limit 16

Both heads have the same sizes, texts and steps, so that only the loss differs. Trees of so many candidates are verified
in each round, greedy, float32. Counts do not depend on what else the machine does. A step is a target pass that
verifies; its tokens are the accepted ones and one of the target's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from counted_steps import share_to_depth, steps_of
from options import append_lines, describe_run, questions_of

from card import LLM
from card.family.ctc.slots import Slots


def measure(args: argparse.Namespace, name: str, questions: list[str], plain: list[list[int]]) -> dict[str, Any]:
    """Return the counts of one head."""
    settings = {"policy": "fixed", "budget": args.candidates, "min_verify_prob": 0.0, "verify": "tree"}
    steps: list[int] = []
    with LLM(args.target, method="ctc", ctc=name, dtype=args.dtype, max_model_len=1024, **settings) as llm:
        for request_id, question in enumerate(questions):
            accepted, token_ids = steps_of(llm, request_id, question, args.max_tokens)
            assert token_ids == plain[request_id], "the text is that of plain decoding"
            steps += accepted
    deepest = Slots.load(name).facts.num_slots
    return {
        "head": Path(name).name,
        "loss": Slots.load(name).facts.loss,
        "candidates": args.candidates,
        "steps": len(steps),
        "tokens a step": round(1 + sum(steps) / len(steps), 3),
        "accepted to depth": share_to_depth(steps, deepest),
        "bytes": Path(name).stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--head", action="append", required=True, help="file of card train ctc; several are compared")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a question each")
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens of a prompt, at most")
    parser.add_argument("--candidates", type=int, default=16, help="verified in a step")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    questions = questions_of(args.prompts, args.limit)
    with LLM(args.target, method="vanilla", dtype=args.dtype, max_model_len=1024) as llm:
        plain = [steps_of(llm, idx, question, args.max_tokens)[1] for idx, question in enumerate(questions)]
    for name in args.head:
        line = {**measure(args, name, questions, plain), **describe_run()}
        print(json.dumps(line), flush=True)
        if args.out is not None:
            append_lines(args.out, [line])


if __name__ == "__main__":
    main()
