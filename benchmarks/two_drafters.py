"""What does a second draft model earn as another writer of the same tree?

Three answers, from the one that depends on the models alone to the one that depends on everything:

``agreement``  on text that the target wrote greedily: how often each draft has the target's token among its first 1, 2,
    4, 8; how often one of them has it; and how often the second has it where the first misses it
``passes``     decoding with drafters that make a fixed number of passes a round, whatever they cost: tokens a target
    pass, candidates verified for each token, and what was accepted from whom. Repeatable to the token.
``speed``      decoding with processes, the rows in turn on every prompt: tokens/s against the first draft alone

    python benchmarks/two_drafters.py --second build/small/draft-small --prompts FILE.jsonl --limit 12 \\
        --out benchmarks/results/two_drafters.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from card import LLM, SamplingParams
from card.bench.environment import MEASURED_START
from card.config import DraftSettings
from card.engine.engine import Engine
from card.engine.further import FURTHER, FurtherDrafter
from card.methods import find_method
from card.models.cuda.bucketed import make_runner
from card.models.loading import end_token_ids, load_model, load_tokenizer
from card.models.protocol import Extension
from card.models.text import encode_chat, encode_prompt
from card.models.torch_runner import TorchRunner
from card.transport.inline import InlineLink
from card.tree.messages import Correction, TargetMessage
from card.workers.drafter import DrafterWorker
from card.workers.metrics import RequestStats
from card.workers.target import TargetRequest, TargetWorker
from card.writers.beam import BeamWriter

RANKS = (1, 2, 4, 8)
_TREE_ROWS = 512

PromptIds = list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """Which drafters write, and how many passes each makes in a round of ``passes``."""

    name: str
    drafts: tuple[str, ...]
    num_passes: tuple[int, ...]


class EagerLink(InlineLink):
    """A drafter that makes its passes as soon as it hears what was committed: once a round."""

    def __init__(self, worker: DrafterWorker, num_passes: int) -> None:
        super().__init__(worker)
        self._num_passes = num_passes

    def send(self, message: TargetMessage) -> None:
        """Hand the message to the worker, and draft on what it says."""
        super().send(message)
        if isinstance(message, Correction):
            self.draft(self._num_passes)


class Bench:
    """The models, loaded once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.target)
        self.prompts = [self._encode(line) for line in args.prompts.read_text().splitlines()[: args.limit]]
        self.params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.max_tokens)
        model = load_model(args.target, dtype=args.dtype)
        self.end_ids = end_token_ids(model, self.tokenizer)
        self.target = self._runner(model)
        self.drafts = {name: self._runner(load_model(name, dtype=args.dtype)) for name in (args.first, args.second)}
        n, (first, second) = args.passes, (args.first, args.second)
        self.rows = (
            Row("first", (first,), (n,)),
            Row("first, twice the passes", (first,), (2 * n,)),
            Row("second", (second,), (n,)),
            Row("second, twice the passes", (second,), (2 * n,)),
            Row("both", (first, second), (n, n)),
            Row("both, second twice the passes", (first, second), (n, 2 * n)),
        )

    def _encode(self, line: str) -> PromptIds:
        prompt = json.loads(line)
        if prompt.get("raw"):
            return encode_prompt(self.tokenizer, prompt["question"])
        return encode_chat(self.tokenizer, [{"role": "user", "content": prompt["question"]}])

    def _runner(self, model: Any) -> TorchRunner:
        return make_runner(model, max_model_len=1024, max_tree_rows=_TREE_ROWS)

    # ---- agreement --------------------------------------------------------------------------------------------------

    def agreement(self) -> list[dict[str, Any]]:
        """Return one line: shares over all tokens that the target wrote."""
        hits: Counter[str] = Counter()
        num_tokens = 0
        for prompt_ids in self.prompts:
            written, _ = self.decode(Row("vanilla", (), ()), prompt_ids)
            text = [*prompt_ids, *written]
            wanted = torch.tensor(written)[:, None]
            top = [self._logits(runner, text, len(prompt_ids)).topk(max(RANKS)).indices for runner in self.both]
            found = [(ranked == wanted).cumsum(1).bool() for ranked in top]  # [T, 8] among the first so many
            num_tokens += len(written)
            for rank in RANKS:
                first, second = (one[:, rank - 1] for one in found)
                hits[f"first_top{rank}"] += int(first.sum())
                hits[f"second_top{rank}"] += int(second.sum())
                hits[f"either_top{rank}"] += int((first | second).sum())
                hits[f"second_where_first_misses_top{rank}"] += int((second & ~first).sum())
        return [{"num_tokens": num_tokens, **{name: round(hit / num_tokens, 4) for name, hit in hits.items()}}]

    @property
    def both(self) -> tuple[TorchRunner, TorchRunner]:
        """The two draft models."""
        return self.drafts[self.args.first], self.drafts[self.args.second]

    @staticmethod
    def _logits(runner: TorchRunner, text: list[int], first: int) -> torch.Tensor:
        """Return the logits [T, V] after each token from index ``first - 1`` to the last but one."""
        slot = runner.open()
        logits = runner.forward([Extension(slot, text[:-1], list(range(-1, len(text) - 2)), first - 1)])[0].float()
        runner.close(slot)
        return logits

    # ---- passes -----------------------------------------------------------------------------------------------------

    def passes(self) -> list[dict[str, Any]]:
        """Return one line for each row. Raises: AssertionError if a text is not that of plain decoding."""
        plain = [self.decode(Row("vanilla", (), ()), prompt_ids)[0] for prompt_ids in self.prompts]
        lines = []
        for row in self.rows:
            done = [self.decode(row, prompt_ids) for prompt_ids in self.prompts]
            num_equal = sum(text == expected for (text, _), expected in zip(done, plain, strict=True))
            assert num_equal == len(plain) or self.args.dtype != "float32", f"{row.name}: the text is another one"
            figures = _costs([stats for _, stats in done])
            lines.append({"row": row.name, "passes_a_round": row.num_passes, "texts_equal": num_equal, **figures})
        return lines

    def decode(self, row: Row, prompt_ids: PromptIds) -> tuple[list[int], RequestStats]:
        """Decode one prompt, the drafters in this thread."""
        method = find_method("card" if row.drafts else "vanilla")
        passes = row.num_passes[0] if row.drafts else 1
        draft = method.shape(
            DraftSettings(
                verify="tree",
                num_speculative_tokens=passes,
                min_verify_prob=self.args.min_verify_prob,
                budget=self.args.budget,
            )
        )
        links = [self._worker(name) for name in row.drafts]
        writers = {}
        if len(links) > 1:
            link = EagerLink(links[1], row.num_passes[1])
            sizes = {"vocab_size": self.target.vocab_size, "max_model_len": self.target.max_model_len}
            further = FurtherDrafter(link, draft, **sizes)
            writers[FURTHER] = further.open
        worker = TargetWorker(self.target, clock=time.perf_counter, writers=writers)
        engine = Engine(worker, InlineLink(links[0]) if links else None, method)
        engine.add(
            TargetRequest(
                request_id=0,
                prompt_ids=tuple(prompt_ids),
                params=self.params,
                draft=draft,
                end_ids=self.end_ids,
                uses_drafter=bool(links),
            )
        )
        token_ids: list[int] = []
        while engine.has_work:
            for update in engine.step():
                token_ids += update.token_ids
        worker.pool.clear()
        return token_ids, update.stats

    def _worker(self, name: str) -> DrafterWorker:
        return DrafterWorker(BeamWriter(self.drafts[name]), clock=time.perf_counter)

    # ---- speed ------------------------------------------------------------------------------------------------------

    def speed(self) -> list[dict[str, Any]]:
        """Return one line for each row: rates by repeat, and the median of their ratios to the first row's."""
        args = self.args
        common: dict[str, Any] = {"dtype": args.dtype, "target_cost": args.target_cost}
        if args.policy == "fixed":
            common |= {"policy": "fixed", "placement": "process", "verify": "tree"}
        drafts: dict[str, tuple[str, str | None]] = {
            "first": (args.first, None),
            "second": (args.second, None),
            "both": (args.first, args.second),
        }
        done: dict[str, list[list[RequestStats]]] = {name: [[] for _ in range(args.repeats)] for name in drafts}
        with contextlib.ExitStack() as stack:
            llms = {
                name: stack.enter_context(LLM(args.target, draft, second_draft=second, **MEASURED_START, **common))
                for name, (draft, second) in drafts.items()
            }
            for llm in llms.values():
                llm.generate([self.prompts[0]], self.params.replace(max_tokens=16))
            for repeat, (idx, prompt_ids) in itertools.product(range(args.repeats), enumerate(self.prompts)):
                names = list(llms)
                for name in names[idx % len(names) :] + names[: idx % len(names)]:  # none is always the first
                    (output,) = llms[name].generate([prompt_ids], self.params)
                    done[name][repeat].append(output.stats)
        rates = {name: [_tokens_per_s(one) for one in repeats] for name, repeats in done.items()}
        return [
            {
                "row": name,
                "policy": args.policy,
                "target_cost": args.target_cost,
                "tokens_per_s": [round(rate, 1) for rate in rates[name]],
                "vs_first": round(
                    statistics.median(a / b for a, b in zip(rates[name], rates["first"], strict=True)), 3
                ),
                **_costs(list(itertools.chain(*done[name]))),
            }
            for name in done
        ]


def _tokens_per_s(stats: Sequence[RequestStats]) -> float:
    return sum(one.num_new_tokens - 1 for one in stats) / sum(one.decode_s for one in stats)


def _costs(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Return what does not depend on time: tokens a pass, verified candidates a token, and accepted by writer."""
    num_passes, num_tokens = sum(s.target_passes for s in stats), sum(s.num_new_tokens - 1 for s in stats)
    verified, accepted = Counter[str](), Counter[str]()
    for one in stats:
        verified.update(one.verified_by_writer or {"beam": one.verified_tokens})
        accepted.update(one.accepted_by_writer or {"beam": one.accepted_tokens})
    return {
        "tokens_a_pass": round(num_tokens / num_passes, 3),
        "verified_a_token": round(sum(verified.values()) / num_tokens, 3),
        "verified_by": dict(verified),
        "accepted_by": dict(accepted),
        "drafter_passes": sum(s.drafter_passes for s in stats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="agreement,passes,speed")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a `question`")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target", default="demo-target")
    parser.add_argument("--first", default="demo-draft")
    parser.add_argument("--second", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--passes", type=int, default=8, help="of each drafter in a round, for `passes`")
    parser.add_argument("--min-verify-prob", type=float, default=0.2, help="for `passes`")
    parser.add_argument("--budget", type=int, default=16, help="for `passes`")
    parser.add_argument("--policy", choices=["auto", "fixed"], default="fixed", help="for `speed`")
    parser.add_argument("--target-cost", default="90M", help="for `speed`")
    parser.add_argument("--repeats", type=int, default=3, help="for `speed`")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args)
    facts = {"benchmark": "two_drafters", "workload": args.prompts.stem, "command": shlex.join(sys.argv)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for part in args.parts.split(","):
        for figures in getattr(bench, part)():
            print(part, json.dumps(figures))
            with args.out.open("a") as out:
                out.write(json.dumps({**facts, "part": part, **figures}) + "\n")


if __name__ == "__main__":
    main()
