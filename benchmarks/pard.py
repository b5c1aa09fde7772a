"""Count what a drafter of several tokens a pass earns: tokens a pass of each model, and acceptance by depth.

    python benchmarks/pard.py --draft FOLDER --draft demo-draft --prompts gsm8k_test.jsonl --limit 16

Chains in turns, greedy; texts are compared with plain decoding's. A folder of `card train pard` drafts with method
pard, any other model with sps. Counts do not depend on what else the machine does; the bonus token of a round is not
counted as accepted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from options import append_lines, describe_run

from card import LLM, SamplingParams
from card.models.parallel_draft import is_parallel_draft


def rounds_of(llm: LLM, request_id: int, question: str, max_tokens: int) -> tuple[list[int], int, list[int]]:
    """Return the accepted tokens of each round of an answer, the drafter's passes, and the text."""
    engine, params = llm.host.engine, SamplingParams(temperature=0.0, max_tokens=max_tokens).resolved()
    prepared = llm.host.make_request([{"role": "user", "content": question}], params, request_id)
    engine.add(prepared.checked)
    accepted: list[int] = []
    text: list[int] = []
    while engine.has_work:
        for update in engine.step():
            accepted.append(len(update.token_ids) - 1)
            text += update.token_ids
    return accepted[1:], update.stats.drafter_passes, text  # the first token comes of the prompt


def plain_texts(args: argparse.Namespace, questions: list[str]) -> list[list[int]]:
    """Return what the target writes alone."""
    with LLM(args.target, method="vanilla", dtype=args.dtype, max_model_len=1024) as llm:
        return [rounds_of(llm, i, question, args.max_tokens)[2] for i, question in enumerate(questions)]


def measure(args: argparse.Namespace, draft: str, questions: list[str], plain: list[list[int]]) -> dict[str, object]:
    """Return the counts of one draft model."""
    method = "pard" if is_parallel_draft(Path(draft)) else "sps"
    length = args.num_speculative_tokens
    settings = {"num_speculative_tokens": length, "dtype": args.dtype, "method": method, "max_model_len": 1024}
    rounds: list[int] = []
    num_passes = num_equal = 0
    with LLM(args.target, draft, placement="inline", policy="fixed", **settings) as llm:
        for request_id, question in enumerate(questions):
            accepted, passes, text = rounds_of(llm, request_id, question, args.max_tokens)
            rounds += accepted
            num_passes += passes
            num_equal += text == plain[request_id]
    shares = [sum(count >= depth for count in rounds) / len(rounds) for depth in range(1, length + 1)]
    return {
        "target": Path(args.target).name,
        "draft": Path(draft).name,
        "method": method,
        "rounds": len(rounds),
        "accepted a round": round(sum(rounds) / len(rounds), 3),
        "accepted a drafter pass": round(sum(rounds) / num_passes, 3),
        "accepted to depth": [round(share, 3) for share in shares],
        "texts": len(questions),
        "texts that are plain decoding's": num_equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--draft", action="append", required=True, help="draft model; may be given several times")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a question each")
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens of a prompt, at most")
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to it")
    args = parser.parse_args()
    lines = args.prompts.read_text("utf-8").splitlines()[: args.limit]
    questions = [json.loads(line)["question"] for line in lines]
    plain = plain_texts(args, questions)
    for draft in args.draft:
        run = describe_run()
        line = {**measure(args, draft, questions, plain), **run}
        print(json.dumps(line), flush=True)
        if args.out is not None:
            append_lines(args.out, [line])


if __name__ == "__main__":
    main()
