"""What does a target that drafts for itself read in long contexts, alone and in batches? Bytes and counts.

A prompt is worked problems in GSM8K's form, as many as fit, and a question; no chat template. Prompts have the same
problems, which are read once, and each has a question and KV rows of its own. Each line has the counts of some requests
at once, and the seconds in which they decode together, which tell something on a quiet machine alone.
With several at once a line holds what that batch did; `--table` also computes batches from a line of one request, since
acceptance is the same: all passes read the weights once, and each request its own KV rows.

    python benchmarks/family/long_contexts.py --target qwen-0.5b.gguf --problems gsm8k_train.jsonl \
        --lengths 4096,16384 --at-once 1,4,16 --out long_contexts.jsonl
    python benchmarks/family/long_contexts.py --table long_contexts.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import gguf
from options import append_lines, describe_run, numbers, read_lines
from pages import markdown

from card.api.llm import LLM
from card.config import SamplingParams
from card.engine.metrics import RequestStats

BENCHMARK = "long_contexts"
BATCHES = (1, 4, 16)
METHODS = ("sparsespec", "specpv@quest:0.125:512", "specpv/partial@quest:0.125:512", "suffix")
COUNTS = (
    *("num_prompt_tokens", "num_new_tokens", "target_passes", "self_draft_passes", "verified_tokens"),
    *("accepted_tokens", "lenient_tokens", "draft_kv_bytes", "verify_kv_bytes"),
)
COLUMNS = (
    "target, context",
    "method",
    "accepted",
    "tokens a full pass",
    *(f"{batch} at once" for batch in BATCHES),
    "tokens/s",
)


def weight_bytes(path: Path) -> int:
    """Return the bytes of weights that a pass reads of a GGUF file: all but an embedding that is no head as well."""
    sizes = {tensor.name: tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors}
    return int(sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0))


def prompts_of(llm: LLM, problems: Path, length: int, count: int) -> list[list[int]]:
    """Return prompts of at most ``length`` tokens: the same worked problems in each, then a question of its own."""
    rows = [json.loads(line) for line in problems.read_text("utf-8").splitlines() if line.strip()]
    encode = llm.host.tokenizer.encode
    ends = [encode(f"Question: {row['question']}\nAnswer:") for row in rows[:count]]
    longest, text = max(map(len, ends)), list[int]()
    for row in rows[count:]:
        ids = encode(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n")
        if len(text) + len(ids) + longest > length:
            break
        text += ids
    return [[*text, *end] for end in ends]


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each context, method and number of requests at once."""
    weights = weight_bytes(Path(args.target))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens).resolved()
    for length in numbers(args.lengths):
        for name in args.methods.split(","):
            named, _, selection = name.partition("@")
            method, _, judge = named.partition("/")
            settings: dict[str, Any] = {"judge": judge} if judge else {}
            settings |= {"kv_selection": selection} if selection else {}
            settings |= {"max_model_len": length + args.max_tokens + 64, "max_num_seqs": max(numbers(args.at_once))}
            with LLM(args.target, None, method=method, policy="fixed", **settings) as llm:
                for count in numbers(args.at_once):
                    llm.reset_prefix_cache()
                    started = time.process_time()
                    prompts = prompts_of(llm, args.problems, length, count)
                    llm.generate(prompts[:1], params.replace(max_tokens=1))
                    outputs = llm.generate(prompts, params)
                    if failed := [one.error for one in outputs if one.error is not None]:
                        raise failed[0]
                    facts = {"benchmark": BENCHMARK, "target": args.target, "weight_bytes": weights}
                    facts |= {
                        "row_bytes": llm.host.runner.row_bytes,
                        "length": length,
                        "method": name,
                        "exact": llm.is_exact,
                    }
                    counted = _counts([one.stats for one in outputs])
                    yield {
                        **facts,
                        "at_once": count,
                        **counted,
                        "decode_s": round(max(one.stats.decode_s for one in outputs), 2),
                        "cpu_s": round(time.process_time() - started, 1),
                        **describe_run(),
                    }


def _counts(stats: Sequence[RequestStats]) -> dict[str, Any]:
    total = RequestStats.joined(stats)
    return {name: getattr(total, name) for name in COUNTS}


def megabytes_a_token(line: dict[str, Any], batch: int) -> tuple[float, float]:
    """Return the megabytes that a token costs in a batch, by this method and by plain decoding.

    Args:
        line: of one request.
    """
    tokens = line["num_new_tokens"] - 1
    rows = line["num_prompt_tokens"] + tokens / 2  # of a pass, in the mean
    passes = line["target_passes"] + line["self_draft_passes"]
    own = line["draft_kv_bytes"] + line["verify_kv_bytes"] or line["target_passes"] * rows * line["row_bytes"]
    weights = line["weight_bytes"] / batch
    return (passes * weights + own) / tokens / 1e6, (weights + rows * line["row_bytes"]) / 1e6


def rows_of(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of the table, plain decoding's first for each target and context."""
    rows: list[list[str]] = []
    for line in (one for one in lines if one["at_once"] == 1):
        context = f"{Path(line['target']).stem}, {line['length']:,}"
        pairs = [megabytes_a_token(line, batch) for batch in BATCHES]
        if not rows or rows[-1][0] != context:
            rows.append([context, "plain", "–", "1.00", *(f"{plain:.0f} MB" for _, plain in pairs), "–"])
        accepted = f"{line['accepted_tokens'] / max(line['verified_tokens'], 1):.0%}".replace("%", " %")
        a_pass = f"{(line['num_new_tokens'] - 1) / line['target_passes']:.2f}"
        cells = [f"{own:.0f} MB, {plain / own:.2f}" for own, plain in pairs]
        rows.append([context, f"`{line['method']}`", accepted, a_pass, *cells, _speeds(line, lines)])
    return rows


def _speeds(line: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """Return the tokens a second of each measured number of requests at once, all together; – without seconds."""
    alike = [one for one in lines if all(one[name] == line[name] for name in ("target", "length", "method"))]
    timed = sorted((one for one in alike if "decode_s" in one), key=lambda one: one["at_once"])
    speeds = [(one["num_new_tokens"] - one["at_once"]) / one["decode_s"] for one in timed]
    return ", ".join(f"{speed:.1f}" for speed in speeds) or "–"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="lines of an earlier run; measure nothing")
    parser.add_argument("--target", help="GGUF file")
    parser.add_argument("--problems", type=Path, help="JSON lines with question and answer, as in GSM8K")
    parser.add_argument("--lengths", default="4096", help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--at-once", default="1", help="requests at once (default: %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="METHOD/JUDGE@SELECTION, the latter two if wanted")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="JSON lines are appended to it")
    args = parser.parse_args(argv)
    if args.table is None:
        for line in measured(args):
            print(line["length"], line["method"], line["at_once"], _counts_in_words(line), flush=True)
            if args.out is not None:
                append_lines(args.out, [line])
    else:
        print(markdown(COLUMNS, rows_of(read_lines(args.table, BENCHMARK)), num_words=2))
    return 0


def _counts_in_words(line: dict[str, Any]) -> str:
    return (
        f"{line['num_new_tokens']} tokens, {line['target_passes']} full and {line['self_draft_passes']} drafting passes"
    )


if __name__ == "__main__":
    sys.exit(main())
