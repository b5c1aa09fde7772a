"""Is the perplexity of a GGUF file under CARD that under llama.cpp?

Both run the same file over the same token ids, those of CARD's tokenizer. llama.cpp is a `llama-server`, asked for one
token after the other; it is built if it is not there. Each file gives a line of JSON.

    python benchmarks/peers/perplexity.py qwen-0.5b.gguf --isa avx2 --texts gsm8k_test.jsonl:question,answer \
        --limit 20 --out benchmarks/results/perplexity.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import environments
import numpy as np
from environments import BuildError
from worker_llama_cpp import LlamaCpp

from card.errors import CardError
from card.models.loading import load_decoder, load_tokenizer
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import how_it_runs, make_runner
from card.tools.bench.environment import allowed_cores, describe_run
from card.tree.logits import as_array, log_softmax


class Scorer(Protocol):
    """An engine that says how likely tokens are."""

    def logprobs(self, token_ids: list[int]) -> tuple[list[float], list[int]]:
        """Return the natural logarithms of all tokens but the first, and the likeliest token at each place."""


class Ours:
    """CARD's pass over a whole text."""

    def __init__(self, runner: RowRunner) -> None:
        """Take over a runner that nobody else uses."""
        self._runner = runner

    def logprobs(self, token_ids: list[int]) -> tuple[list[float], list[int]]:
        """Return what `Scorer` promises."""
        slot = self._runner.open()
        (logits,) = self._runner.forward([Extension(slot, token_ids, range(-1, len(token_ids) - 1))])
        self._runner.close(slot)
        logprobs = log_softmax(as_array(logits)[:-1])
        chosen = logprobs[np.arange(len(logprobs)), token_ids[1:]]
        return chosen.tolist(), logprobs.argmax(-1).tolist()


class Theirs:
    """A `llama-server` over a text, token by token."""

    def __init__(self, server: LlamaCpp) -> None:
        """Take a worker that was prepared for plain decoding."""
        self._server = server

    def logprobs(self, token_ids: list[int]) -> tuple[list[float], list[int]]:
        """Return what `Scorer` promises."""
        return self._server.logprobs("plain", {}, token_ids)


def compare(ours: Scorer, theirs: Scorer, texts: Sequence[list[int]]) -> dict[str, Any]:
    """Return the perplexity of texts under both, how far ours is off, and how often both find one token likeliest."""
    sums, num_tokens, num_agreed = [0.0, 0.0], 0, 0
    for token_ids in texts:
        (our_logprobs, our_best), (their_logprobs, their_best) = (one.logprobs(token_ids) for one in (ours, theirs))
        sums = [sums[0] - sum(our_logprobs), sums[1] - sum(their_logprobs)]
        num_tokens += len(token_ids) - 1
        num_agreed += sum(a == b for a, b in zip(our_best, their_best, strict=True))
    card, llama = (math.exp(one / num_tokens) for one in sums)
    return {
        "tokens": num_tokens,
        "perplexity": {"card": round(card, 4), "llama.cpp": round(llama, 4)},
        "change": round(card / llama - 1, 5),
        "top1_agreement": round(num_agreed / num_tokens, 4),
    }


def read_texts(wanted: str, tokenizer: Any, *, limit: int, max_tokens: int) -> list[list[int]]:
    """Return the token ids of the first texts that FILE:FIELD,FIELD asks for. Raises: OSError, ValueError, KeyError."""
    file, _, fields = wanted.rpartition(":")
    texts = []
    for line in Path(file).read_text("utf-8").splitlines()[:limit]:
        record = json.loads(line)
        texts.append(tokenizer.encode("\n".join(record[field] for field in fields.split(",")))[:max_tokens])
    return [token_ids for token_ids in texts if len(token_ids) > 1]


@contextlib.contextmanager
def _llama(model: Path, folder: Path, context: int) -> Iterator[LlamaCpp]:
    """Run a server of a file, and build it first if it is not there."""
    with environments.building(folder):
        environments.ensure(folder, "llama.cpp")
    server = LlamaCpp()
    program = str(environments.llama_program(folder, "llama-server"))
    job = {"server": program, "target": str(model), "context": context, "cores": list(allowed_cores())}
    server.load({**job, "version": environments.LLAMA_VERSION, "end_ids": []})
    try:
        server.prepare("plain", {}, [])
        yield server
    finally:
        server.close()


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the line of one file. Raises: BuildError, CardError, OSError, RuntimeError."""
    tokenizer = load_tokenizer(str(model))
    texts = read_texts(args.texts, tokenizer, limit=args.limit, max_tokens=args.max_tokens)
    runner = make_runner(load_decoder(str(model), dtype="auto"), max_model_len=args.max_tokens, max_tree_rows=0)
    with _llama(model, args.envs.absolute(), args.max_tokens + 1) as server:
        found = compare(Ours(runner), Theirs(server), texts)
    facts = describe_run()
    return {
        "benchmark": "perplexity",
        "model": model.name,
        "runs": how_it_runs(runner),
        "texts": Path(args.texts.rpartition(":")[0]).name,
        "num_texts": len(texts),
        **found,
        "llama_cpp_python": environments.LLAMA_VERSION,
        "started": facts.date,
        "command": facts.command,
        "commit": facts.commit,
        "machine": {**facts.machine, "isa": args.isa or "all"},
    }


def main() -> int:
    """Compare both on each file, and print and keep what came of it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--texts", required=True, metavar="FILE:FIELD,FIELD", help="lines of JSON")
    parser.add_argument("--limit", type=int, default=20, help="texts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a text (default: %(default)s)")
    parser.add_argument("--isa", choices=[*environments.LIMITS], help="hold both to these instructions")
    parser.add_argument("--envs", type=Path, default=environments.default_folder(), help="folder of llama.cpp's build")
    parser.add_argument("--out", type=Path, help="lines are appended to this file")
    args = parser.parse_args()
    if args.isa:
        args.envs = args.envs / args.isa
        os.environ |= environments.LIMITS[args.isa]
    for model in args.models:
        try:
            line = measure(model, args)
        except (BuildError, CardError, OSError, RuntimeError, ValueError, KeyError) as error:
            print(f"perplexity.py: error: {error}", file=sys.stderr)
            return 2
        print(json.dumps({key: line[key] for key in ("model", "tokens", "perplexity", "change", "top1_agreement")}))
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
