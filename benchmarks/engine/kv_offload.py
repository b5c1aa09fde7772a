"""How many requests run at once if memory is given out by expected lengths, and what do moved rows cost?

    python benchmarks/engine/kv_offload.py --prompts gsm8k_test.jsonl --folder FOLDER --out kv_offload.jsonl

The same requests run through the engine twice: with room for their longest texts, and with --kv-offload. Two crowds:
texts that end by themselves, and texts that all get as long as they may behind short ones, so that too little is
expected of them. Figures are counts, which do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from options import append_lines, describe_run, questions_of

from card import LLM, SamplingParams

CROWDS = ("ends by itself", "longer than expected")
_NUM_SHORT, _SHORT_TOKENS = 8, 24  # of the crowd of which too little is expected


def params_of(crowd: str, idx: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of a request: each other one is sampled."""
    is_short, is_forced = crowd == CROWDS[1] and idx < _NUM_SHORT, crowd == CROWDS[1]
    length = _SHORT_TOKENS if is_short else max_tokens
    return SamplingParams(temperature=float(idx % 2), seed=idx, max_tokens=length, ignore_eos=is_forced).resolved()


def run(args: argparse.Namespace, crowd: str, questions: list[str], folder: str | None) -> dict[str, Any]:
    """Return counts and the texts of a run."""
    settings = {"method": args.method, "kv_cache_memory": args.kv_cache_memory, "max_num_seqs": args.max_num_seqs}
    with LLM(args.target, dtype=args.dtype, kv_offload=folder, cache=False, **settings) as llm:
        host, engine = llm.host, llm.host.engine
        for idx, question in enumerate(questions):
            messages = [{"role": "user", "content": question}]
            engine.add(host.make_request(messages, params_of(crowd, idx, args.max_tokens), idx).checked)
        texts: dict[int, list[int]] = {idx: [] for idx in range(len(questions))}
        at_once: list[int] = []
        while engine.has_work:
            for update in engine.step():
                texts[update.request_id] += update.token_ids
            at_once.append(engine.stats().num_running)
        stats = engine.stats()
        return {
            "texts": texts,
            "most at once": max(at_once),
            "mean at once": round(sum(at_once) / len(at_once), 2),
            "rounds": stats.rounds,
            "rows run": stats.target_tokens,
            "new tokens": stats.new_tokens,
            "pauses": stats.num_pauses,
            "rows moved": stats.kv_moved_bytes // host.runner.row_bytes,
            "failed": stats.num_failed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="vanilla")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a question each")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--kv-cache-memory", default="16M")
    parser.add_argument("--folder", required=True, help="where rows are moved to")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    args = parser.parse_args()
    run_facts = describe_run()
    questions = questions_of(args.prompts, args.limit)
    for crowd in CROWDS:
        wanted: dict[int, list[int]] | None = None
        for admission, folder in (("longest", None), ("expected", args.folder)):
            figures = run(args, crowd, questions, folder)
            texts = figures.pop("texts")
            wanted = texts if wanted is None else wanted
            told = {"crowd": crowd, "admission": admission, "method": args.method, "memory": args.kv_cache_memory}
            line = {**told, **figures, "equal texts": texts == wanted}
            print(json.dumps(line), flush=True)
            append_lines(args.out, [{**line, **run_facts}])


if __name__ == "__main__":
    main()
