"""Would requests that sit out a round after their verification gain anything here? Counts rounds, rows and seconds.

    python benchmarks/delayed_verification.py --target smollm2-135m.gguf --dtype int8 --texts gsm8k_train.jsonl \\
        --out delayed.jsonl

Engines that compute on a GPU let a request wait for a round, so that the CPU works out what was accepted beside the
next pass. At best all that a verification takes around its pass is hidden so. In exchange a cycle of K drafts and a
verification becomes a round longer. Requests draft for themselves (sparsespec), all at once; seconds are those of the
processor, of all threads, so other work beside does not count. What a verification and a draft take around passes is
fitted to the seconds of all rounds. Rounds with the wait are those of the same drafts and verifications, each
verification followed by an idle round.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from options import append_lines, describe_run

from card import LLM, SamplingParams


def prompts_of(path: Path, llm: LLM, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return prompts of so many tokens each, one behind the other in the file."""
    found: list[int] = []
    for line in path.read_text("utf-8").splitlines():
        one = json.loads(line)
        found += llm.host.tokenizer.encode(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n")
        if len(found) >= num_prompts * num_tokens:
            return [found[i * num_tokens : (i + 1) * num_tokens] for i in range(num_prompts)]
    raise SystemExit(f"{path} has {len(found)} tokens; name a longer file, or ask for fewer or shorter prompts")


def decode(llm: LLM, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Return counts and seconds of the rounds in which all requests decode."""
    engine, runner = llm.host.engine, llm.host.runner
    forward, passes_s = runner.forward, [0.0]

    def timed(extensions: Any) -> Any:
        started = time.process_time()
        logits = forward(extensions)
        passes_s[0] += time.process_time() - started
        return logits

    runner.forward = timed  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True).resolved()
    requests = [llm.host.make_request(prompt, params, idx).checked for idx, prompt in enumerate(prompts)]
    for one in requests:
        engine.add(one)
    stats: dict[int, Any] = {}
    while len(stats) < len(prompts):  # until each has its first token
        stats |= {update.request_id: update.stats for update in engine.step()}
    drafted, verified = ({i: getattr(one, name) for i, one in stats.items()} for name in _COUNTED)
    num_rows, num_new, all_s = -engine.stats().target_tokens, 0, 0.0
    work, around_s = list[tuple[int, int, int]](), list[float]()
    while engine.has_work:
        counts_before = [sum(getattr(one, name) for one in stats.values()) for name in _COUNTED]
        passes_s[0], started = 0.0, time.process_time()
        updates = engine.step()
        round_s = time.process_time() - started
        counts = [sum(getattr(one, name) for one in stats.values()) for name in _COUNTED]
        drafts, verifications = (after - before for after, before in zip(counts, counts_before, strict=True))
        work.append((1, drafts, verifications))
        around_s.append(round_s - passes_s[0])
        all_s += round_s
        num_new += sum(len(update.token_ids) for update in updates)
    num_rows += engine.stats().target_tokens
    rounds, waits = len(work), sum(one.target_passes - verified[i] for i, one in stats.items())
    taken = {i: one.self_draft_passes - drafted[i] + 2 * (one.target_passes - verified[i]) for i, one in stats.items()}
    longest = max(taken.values())
    (_, _, verification_s), *_ = np.linalg.lstsq(np.array(work), np.array(around_s), rcond=None)
    return {
        "rounds": rounds,
        "rounds with the wait": longest,
        "tokens a round": round(num_new / rounds, 2),
        "tokens a round with the wait": round(num_new / longest, 2),
        "rows a round": round(num_rows / rounds, 2),
        "rows a round with the wait": round(num_rows / longest, 2),
        "places idle a round with the wait": round(waits / longest, 2),
        "around passes": round(sum(around_s) / all_s, 4),
        "of that verifications": round(float(verification_s) * waits / all_s, 4),
        "verifications that would pay": round(1 - rounds / longest, 4),
        "processor s": round(all_s, 2),
    }


_COUNTED = ("self_draft_passes", "target_passes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--target-cost")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-selection", default="sparse:0.05:64")
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines with a question and its answer")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--num-speculative-tokens", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args()
    run = describe_run()
    settings: dict[str, Any] = {
        "kv_selection": args.kv_selection,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    settings |= {"target_cost": args.target_cost, "max_model_len": args.context + args.max_tokens}
    with LLM(args.target, method="sparsespec", dtype=args.dtype, cache=False, **settings) as llm:
        figures = decode(llm, prompts_of(args.texts, llm, args.batch, args.context), args.max_tokens)
        name = Path(args.target).name
        line = {"target": name, "cost": args.target_cost, "batch": args.batch, "k": args.num_speculative_tokens}
    line |= {"context": args.context, **figures}
    print(json.dumps(line), flush=True)
    append_lines(args.out, [{**line, **run}])


if __name__ == "__main__":
    main()
