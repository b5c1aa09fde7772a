"""What does a target that drafts for itself read in long contexts, alone and in batches? Bytes and counts.

A prompt is worked problems in GSM8K's form, as many as fit, and a question; no chat template. Prompts have the same
problems, which are read once, and each has a question and KV rows of its own. Each line has the counts of some requests
at once, and their rounds, each of which reads the weights once. --timed, on a quiet machine, adds the seconds in which
they decode together. Where a batch was not run, `--table` computes it from the line of the fewest requests at once, as
acceptance does not depend on others: all passes share the weights, and each request reads its own KV rows.

    python benchmarks/family/long_contexts.py --target qwen-0.5b.gguf --problems gsm8k_train.jsonl \
        --methods vanilla,sparsespec,suffix --lengths 4096,16384 --at-once 1,4,16 --timed --out long_contexts.jsonl
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
PLAIN = "vanilla"
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
                    before = llm.stats().rounds
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
                        "rounds": llm.stats().rounds - before,
                        **counted,
                        **({"decode_s": round(max(one.stats.decode_s for one in outputs), 2)} if args.timed else {}),
                        "cpu_s": round(time.process_time() - started, 1),
                        **describe_run(),
                    }


def _counts(stats: Sequence[RequestStats]) -> dict[str, Any]:
    total = RequestStats.joined(stats)
    return {name: getattr(total, name) for name in COUNTS}


def megabytes_a_token(line: dict[str, Any], batch: int) -> float:
    """Return the megabytes that a token costs in a batch, of weights and KV rows.

    Args:
        line: of a batch of this size, or of another one, whose requests are taken to share their passes as this
            batch would.
    """
    at_once = line["at_once"]
    tokens = line["num_new_tokens"] - at_once
    passes = (line["target_passes"] + line["self_draft_passes"]) / batch
    if at_once == batch > 1:
        passes = line["rounds"]
    return (passes * line["weight_bytes"] + _row_bytes(line, tokens)) / tokens / 1e6


def _row_bytes(line: dict[str, Any], tokens: int) -> float:
    """Return the bytes of KV rows that all requests of a line read."""
    if own := line["draft_kv_bytes"] + line["verify_kv_bytes"]:
        return float(own)
    rows = (line["num_prompt_tokens"] + tokens / 2) / line["at_once"]  # of a pass, in the mean
    return float(line["target_passes"] * rows * line["row_bytes"])


def plain_line(line: dict[str, Any]) -> dict[str, Any]:
    """Return what plain decoding counts for the texts of a line."""
    passes = line["num_new_tokens"] - line["at_once"]
    counts = {"target_passes": passes, "rounds": passes / line["at_once"], "verified_tokens": 0, "accepted_tokens": 0}
    blank = dict.fromkeys(("self_draft_passes", "draft_kv_bytes", "verify_kv_bytes"), 0)
    return {**{name: value for name, value in line.items() if name != "decode_s"}, "method": PLAIN, **counts, **blank}


def rows_of(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of the table, plain decoding's first for each target and context."""
    by_context: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        by_context.setdefault((Path(line["target"]).stem, line["length"]), []).append(line)
    rows = []
    for (target, length), all_of in by_context.items():
        fewest: dict[str, dict[str, Any]] = {}  # requests at once
        for line in sorted(all_of, key=lambda line: line["at_once"]):
            fewest.setdefault(line["method"], line)
        methods = [method for method in fewest if method != PLAIN]
        fewest.setdefault(PLAIN, plain_line(next(iter(fewest.values()))))
        runs = {(line["method"], line["at_once"]): line for line in all_of}
        plain = [megabytes_a_token(runs.get((PLAIN, batch), fewest[PLAIN]), batch) for batch in BATCHES]
        for method in (PLAIN, *methods):
            one, cells = fewest[method], []
            for batch, of_plain in zip(BATCHES, plain, strict=True):
                own = megabytes_a_token(runs.get((method, batch), one), batch)
                mark = "" if (method, batch) in runs else "≈ "
                cells.append(f"{mark}{own:.0f} MB" + ("" if method == PLAIN else f", {of_plain / own:.2f}"))
            accepted = f"{one['accepted_tokens'] / max(one['verified_tokens'], 1):.0%}".replace("%", " %")
            a_pass = f"{(one['num_new_tokens'] - one['at_once']) / one['target_passes']:.2f}"
            named = ["plain", "–", a_pass] if method == PLAIN else [f"`{method}`", accepted, a_pass]
            rows.append([f"{target}, {length:,}", *named, *cells, _speeds(one, all_of)])
    return rows


def _speeds(line: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """Return the tokens a second of each measured number of requests at once, all together; – without seconds."""
    alike = [one for one in lines if one["method"] == line["method"] and "decode_s" in one]
    speeds = [
        (one["num_new_tokens"] - one["at_once"]) / one["decode_s"]
        for one in sorted(alike, key=lambda one: one["at_once"])
    ]
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
    parser.add_argument("--timed", action="store_true", help="the machine is quiet: write the seconds, too")
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
