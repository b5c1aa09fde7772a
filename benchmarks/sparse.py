"""Measure a target that drafts for itself over long texts: KV bytes read, acceptance, tokens a pass and time.

    python benchmarks/sparse.py --target smollm2-135m.gguf --dtype int8 --texts gsm8k_train.jsonl --contexts 4096,8192

A row is a method, the KV rows that it reads, and perhaps a judge: specpv/quest:0:512/partial. A prompt is questions
with their answers, one after the other, up to the context less the new tokens. Each row decodes each prompt greedily,
in turns with plain decoding by the same engine, whose tokens its own are compared with. Bytes and counts do not depend
on what else the machine does; times do, and are the least of ``--repeats``. All but the first copy the prompt's rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from options import append_lines, describe_run

from card import LLM, SamplingParams
from card.api.outputs import RequestOutput


def prompt_of(path: Path, llm: LLM, num_tokens: int, skip: int) -> list[int]:
    """Return the tokens of examples from the ``skip``-th on, exactly ``num_tokens`` of them."""
    found: list[int] = []
    for line in path.read_text("utf-8").splitlines()[skip:]:
        one = json.loads(line)
        found += llm.host.tokenizer.encode(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n")
        if len(found) >= num_tokens:
            return found[:num_tokens]
    raise SystemExit(f"{path} has fewer than {num_tokens} tokens; name a longer file or a shorter context")


def row_of(llm: LLM, outputs: list[RequestOutput], plain: list[RequestOutput], wall_s: float) -> dict[str, Any]:
    """Return the figures of the prompts that were decoded at once."""
    stats = [one.stats for one in outputs]
    passes, drafted = sum(one.target_passes for one in stats), sum(one.self_draft_passes for one in stats)
    accepted, verified = sum(one.accepted_tokens for one in stats), sum(one.verified_tokens for one in stats)
    rows = sum(one.num_prompt_tokens + one.num_new_tokens / 2 for one in stats) / len(stats)
    full_bytes = rows * llm.host.runner.row_bytes  # that a pass reads which reads all
    draft_bytes = sum(one.draft_kv_bytes for one in stats)
    all_bytes = draft_bytes + sum(one.verify_kv_bytes for one in stats) or passes * full_bytes
    pairs = [
        (a == b)
        for one, other in zip(outputs, plain, strict=True)
        for a, b in zip(one.outputs[0].token_ids, other.outputs[0].token_ids, strict=True)
    ]
    return {
        "exact": llm.is_exact,
        "equal tokens": round(sum(pairs) / len(pairs), 3),
        "equal until": pairs.index(False) if False in pairs else len(pairs),
        "lenient tokens": sum(one.lenient_tokens for one in stats),
        "tokens a verification": round(1 + accepted / passes, 2),
        "acceptance": round(accepted / verified, 3) if verified else None,
        "tokens a pass": round((accepted + passes) / (passes + drafted), 3),
        "KV share of a draft": round(draft_bytes / drafted / full_bytes, 4) if drafted else None,
        "KV MB a token": round(all_bytes / (accepted + passes) / 1e6, 2),
        "decode s": round(wall_s, 3),
    }


def measure(args: argparse.Namespace, context: int, row: str) -> dict[str, Any]:
    """Return the figures of a row."""
    method, selection, judge = (*row.split("/"), None, None)[:3]
    settings: dict[str, Any] = {"kv_selection": selection, "judge": judge}
    if method != "vanilla":
        settings["num_speculative_tokens"] = args.num_speculative_tokens
    with LLM(args.target, method=method, dtype=args.dtype, max_model_len=context, cache=False, **settings) as llm:
        prompts = [prompt_of(args.texts, llm, context - args.max_tokens, 100 * i) for i in range(args.batch)]
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True).resolved()
        best_s: dict[bool, float] = {}
        outputs: dict[bool, list[RequestOutput]] = {}
        for speculates in [False, True] * (args.repeats + 1):
            found = llm.generate(prompts, params.replace(speculates=speculates))
            seconds = max(one.stats.decode_s for one in found)
            best_s[speculates] = min(seconds, best_s.get(speculates, seconds))
            outputs[speculates] = found
        figures = row_of(llm, outputs[True], outputs[False], best_s[True])
        return {**figures, "plain decode s": round(best_s[False], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with a question and its answer")
    parser.add_argument("--contexts", default="4096,8192", help="tokens of prompt and answer")
    parser.add_argument("--rows", default="vanilla,sparsespec/sparse,sparsespec/vegas")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once")
    parser.add_argument("--num-speculative-tokens", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON lines are appended to it")
    args = parser.parse_args()
    for context in map(int, args.contexts.split(",")):
        for row in args.rows.split(","):
            figures = measure(args, context, row)
            told = {"context": context, "batch": args.batch, "row": row, "k": args.num_speculative_tokens, **figures}
            print(json.dumps(told), flush=True)
            if args.out is not None:
                append_lines(args.out, [{**told, **describe_run()}])


if __name__ == "__main__":
    main()
