"""How many word problems does a model solve, and does a dtype cost any?

Each question of a file in GSM8K's form goes through the model's chat template and is answered greedily by plain
decoding; solved means that the last number of the answer is the file's. One line of JSON for each dtype, with every
item, so that two dtypes can be compared item by item. In int8 the answers do not depend on how many run at once.

    python benchmarks/int8/accuracy.py MODEL --prompts gsm8k_test.jsonl --limit 200 --dtypes bfloat16,int8 \
        --out benchmarks/results/accuracy.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import options
from word_problems import INSTRUCTION, Item, read_items

from card.api.llm import LLM
from card.config import SamplingParams
from card.errors import CardError, SettingsError
from card.models.loading import load_tokenizer
from card.text.answers import final_number
from card.text.prompts import encode_chat


def run(model: str, dtype: str, items: Sequence[Item], *, max_tokens: int, at_once: int) -> dict[str, Any]:
    """Answer all items in one dtype and return what came of it. Raises: CardError."""
    tokenizer = load_tokenizer(model)
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": item.prompt}]) for item in items]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens).resolved()
    results: list[dict[str, Any]] = []
    with LLM(model, dtype=dtype, tokenizer=tokenizer, max_num_seqs=at_once, method="vanilla") as llm:
        started = time.perf_counter()
        for first, batch in _batches(prompts, at_once):
            for item, output in zip(items[first:], llm.generate(batch, params), strict=False):
                answer, found = output.outputs[0], final_number(output.outputs[0].text)
                results.append(
                    {
                        "expected": str(item.answer),
                        "found": None if found is None else str(found),
                        "is_solved": found == item.answer,
                        "tokens": len(answer.token_ids),
                        "finish": answer.finish_reason,
                        "text_sha256": hashlib.sha256(answer.text.encode()).hexdigest()[:16],
                    }
                )
        seconds = time.perf_counter() - started
    return {
        "benchmark": "accuracy",
        "model": Path(model).name,
        "dtype": dtype,
        "num_items": len(results),
        "num_solved": sum(one["is_solved"] for one in results),
        "num_cut_off": sum(one["finish"] == "length" for one in results),
        "max_tokens": max_tokens,
        "at_once": at_once,
        "seconds": round(seconds, 1),
        "instruction": INSTRUCTION,
        "items": results,
    }


def sentence(line: dict[str, Any]) -> str:
    """Return a line in words."""
    share = line["num_solved"] / line["num_items"]
    spread = (share * (1 - share) / line["num_items"]) ** 0.5
    return (
        f"{line['model']}, {line['dtype']}: {line['num_solved']} of {line['num_items']} solved "
        f"({share:.1%}, standard error {spread:.1%}), {line['num_cut_off']} cut off, {line['seconds']:.0f} s"
    )


def _batches(prompts: Sequence[list[int]], at_once: int) -> Iterator[tuple[int, list[list[int]]]]:
    for first in range(0, len(prompts), at_once):
        yield first, list(prompts[first : first + at_once])


def main() -> None:
    """Answer the questions in every dtype, and print and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a GGUF file, or a name on the hub")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines as in GSM8K: question and answer")
    parser.add_argument("--limit", type=int, default=100, help="how many items (default: %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,int8", help="one after the other (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most new tokens (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=4, help="questions in one batch (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file to append a line of JSON for each dtype to")
    args = parser.parse_args()
    try:
        if args.at_once < 1:
            raise SettingsError(f"--at-once must be 1 or more, got {args.at_once}")
        items = read_items(args.prompts, args.limit)
        facts = {**options.describe_run(), "prompts": args.prompts.name}
        for dtype in args.dtypes.split(","):
            line = run(args.model, dtype, items, max_tokens=args.max_tokens, at_once=args.at_once)
            print(sentence(line), flush=True)
            if args.out:
                options.append_lines(args.out, [{**line, **facts}])
    except CardError as error:
        raise SystemExit(f"accuracy.py: {error}") from None


if __name__ == "__main__":
    main()
