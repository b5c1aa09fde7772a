"""Count what a draft model loses that proposes a part of the vocabulary, and what its steps then read.

    python benchmarks/family/draft_vocab.py --target qwen-1.5b.gguf --draft qwen-0.5b.gguf --prompts humaneval.jsonl

The target answers each prompt plainly. The draft model reads these texts, and chooses at each place among the tokens
that it may propose, with the target's noise. From that follow chains of any length: a chain is right as far as its
choices are the text's. Counts do not depend on what else the machine does.

`ids` are the first so many tokens by number, `counts` those that texts use most. `read` adds the text up to that place,
as passes of our own do. Speeds are by bytes: the tokens of a step over the weights that it reads, the target's being
one, with the best length of up to 8.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from counted_steps import share_to_depth
from options import append_lines, describe_run, questions_of

from card import LLM, SamplingParams
from card.config import SamplingRule
from card.models.candidate_scorer import CandidateScorer
from card.models.draft_vocab import always_drafted, drafted_ids, restrict_head
from card.models.drafter_facts import pass_bytes
from card.models.facts import end_token_ids
from card.models.loading import load_decoder, load_tokenizer
from card.models.protocol import Extension
from card.models.runner import RowRunner
from card.models.runners import plain_runner

_CANDIDATES = 512  # of the draft model at each place: which of them is chosen depends on the part that it may propose
_LONGEST = 8
_TOKENS = 4  # of the chains whose depths are told


@dataclass(frozen=True, slots=True)
class Answer:
    """A text of the target, and the draft model's best candidates [T, C] for each of its tokens."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    seed: int
    ranked: np.ndarray[Any, Any] | None = None

    def right(self, kept: set[int], *, reads: bool) -> list[bool]:
        """Return for each token whether a draft model that may propose some tokens chooses it."""
        assert self.ranked is not None
        known = {*kept, *self.prompt_ids} if reads else kept
        found = []
        for row, token in zip(self.ranked.tolist(), self.token_ids, strict=True):
            found.append(next((one for one in row if one in known), None) == token)
            if reads:
                known.add(token)
        return found


def answers_of(llm: LLM, questions: Sequence[str], temperature: float, max_tokens: int) -> list[Answer]:
    """Return the target's own texts, each with a seed of its own."""
    params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i) for i in range(len(questions))]
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    return [
        Answer(tuple(one.prompt_token_ids), tuple(one.outputs[0].token_ids), seed) for seed, one in enumerate(outputs)
    ]


def ranked(runner: RowRunner, answer: Answer, temperature: float) -> Answer:
    """Return the answer with the draft model's candidates."""
    rule = SamplingRule.of(SamplingParams(temperature=temperature, seed=answer.seed).resolved())
    first = len(answer.prompt_ids) - 1
    text = [*answer.prompt_ids, *answer.token_ids[:-1]]
    slot = runner.open(len(text))
    (logits,) = runner.forward([Extension.of_text(slot, text, first_logits=first)])
    runner.close(slot)
    scorer = CandidateScorer(rule, runner.vocab_size, coupled=True)
    found, _ = scorer.top(logits, range(first + 1, len(text) + 1), _CANDIDATES)
    return Answer(answer.prompt_ids, answer.token_ids, answer.seed, np.array(found))


def steps_of(right: Sequence[bool], length: int) -> list[int]:
    """Return the accepted tokens of each step with chains of a length; the first token comes of the prompt."""
    steps, place = list[int](), 1
    while place < len(right):
        chain = right[place : place + length]
        steps.append(chain.index(False) if False in chain else len(chain))
        place += steps[-1] + 1
    return steps


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the counts of each part of the vocabulary for each file of prompts and temperature."""
    asked = {path.stem: questions_of(path, args.limit) for path in args.prompts}
    tokenizer, model = load_tokenizer(args.target), load_decoder(args.draft)
    target_bytes, ends = pass_bytes(load_decoder(args.target)), end_token_ids(model, tokenizer)
    always = {*always_drafted(tokenizer), *ends}
    parts: dict[str, tuple[set[int], bool]] = {"all": (set(range(len(tokenizer))), False)}
    for size in args.sizes:
        used = {*(drafted_ids(tokenizer, size) or ()), *ends}
        parts |= {f"ids {size}": ({*range(size), *always}, False), f"counts {size}": (used, False)}
        parts[f"counts {size} and read"] = (used, True)
    shares = {name: pass_bytes(restrict_head(model, kept)) / target_bytes for name, (kept, _) in parts.items()}
    runner = plain_runner(model, max_model_len=args.max_model_len)
    limits = {"max_model_len": args.max_model_len, "max_num_seqs": 48}
    with LLM(args.target, method="vanilla", **limits) as llm:
        for temperature in args.temperatures:
            questions = [one for of in asked.values() for one in of]
            texts = iter(answers_of(llm, questions, temperature, args.max_tokens))
            for data, of in asked.items():
                answers = [ranked(runner, next(texts), temperature) for _ in of]
                for name, (kept, reads) in parts.items():
                    right = [one.right(kept, reads=reads) for one in answers]
                    yield {
                        "tokens proposed": name,
                        "temperature": temperature,
                        "data": data,
                        "texts": len(answers),
                        "draft step over target pass": round(shares[name], 4),
                        **counted(right, shares[name]),
                    }


def counted(right: Sequence[Sequence[bool]], share: float) -> dict[str, Any]:
    """Return what follows of the right places of texts, for steps that read this share of a pass of the target."""
    places = [one for of in right for one in of[1:]]
    steps = [step for of in right for step in steps_of(of, _TOKENS)]
    speeds = {}
    for length in range(1, _LONGEST + 1):
        taken = [step for of in right for step in steps_of(of, length)]
        speeds[length] = (1 + sum(taken) / len(taken)) / (1 + length * share)
    best = max(speeds, key=lambda length: speeds[length])
    return {
        "places": len(places),
        "right": round(sum(places) / len(places), 4),
        "tokens a step": round(1 + sum(steps) / len(steps), 3),
        "accepted to depth": share_to_depth(steps, _TOKENS),
        "best length": best,
        "speed by bytes": round(speeds[best], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="JSON lines with a question each")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of a prompt, at most")
    parser.add_argument("--max-model-len", type=int, default=768)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8_192, 16_384, 32_768])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    for line in measure(args):
        told = {**line, **describe_run()}
        print(json.dumps(told), flush=True)
        if args.out is not None:
            append_lines(args.out, [told])


if __name__ == "__main__":
    main()
