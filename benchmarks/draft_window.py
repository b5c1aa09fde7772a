"""How much of a prompt must a draft model read?

The target answers long prompts greedily. The draft model then reads the same text, whole or only the prompt's first few
and last tokens, and the answer behind it in one pass: how often is its likeliest token the answer's next one? The
scores are counts, so a busy machine changes none. One line of JSON for each prompt.

    python benchmarks/draft_window.py TARGET DRAFT --texts chat=gsm8k_test.jsonl:question,answer \
        --out FILE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np
import options

from card.errors import BenchError
from card.models.facts import end_token_ids
from card.models.loading import load_decoder, load_tokenizer
from card.models.protocol import Extension, LanguageModel
from card.models.runners import plain_runner
from card.text.prompts import encode_chat
from card.tree.logits import as_array

_PIECE = 512  # tokens of a pass over a prompt


def windowed(prompt: Sequence[int], first: int, last: int) -> list[int]:
    """Return the first and the last tokens of a prompt, or all of a prompt that has no more than these."""
    return list(prompt) if len(prompt) <= first + last else [*prompt[:first], *prompt[-last:]]


def likeliest(runner: LanguageModel, slot: int, token_ids: Sequence[int], count: int = 1) -> list[int]:
    """Run tokens behind those that a sequence holds; return the likeliest tokens behind the last ``count``."""
    num_before = len(token_ids) - count
    parts = [token_ids[i : min(i + _PIECE, num_before)] for i in range(0, num_before, _PIECE)]
    for part in parts:
        _run(runner, slot, part, 1)
    return _run(runner, slot, token_ids[num_before:], count)


def answer_of(runner: LanguageModel, prompt: Sequence[int], count: int, ends: Container[int]) -> list[int]:
    """Return the first ``count`` tokens of a greedy answer, fewer if one of ``ends`` comes before."""
    slot = runner.open(len(prompt) + count)
    answer = likeliest(runner, slot, prompt)
    while len(answer) < count and answer[-1] not in ends:
        answer += likeliest(runner, slot, answer[-1:])
    runner.close(slot)
    return answer


def num_agreed(runner: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many tokens of an answer are the likeliest ones of ``runner`` behind this prompt."""
    token_ids = [*prompt, *answer[:-1]]
    slot = runner.open(len(token_ids))
    found = likeliest(runner, slot, token_ids, len(answer))
    runner.close(slot)
    return sum(one == other for one, other in zip(found, answer, strict=True))


def messages(wanted: str, num_chars: int, skip: int) -> list[dict[str, str]]:
    """Return a chat of about so many characters of what NAME=FILE:ASKED,ANSWERED names; it ends with a question."""
    file, _, fields = wanted.partition("=")[2].rpartition(":")
    asked, _, answered = fields.partition(",")
    chat: list[dict[str, str]] = []
    for line in Path(file).read_text("utf-8").splitlines()[skip:]:
        record = json.loads(line)
        chat.append({"role": "user", "content": record[asked]})
        if sum(len(one["content"]) for one in chat) >= num_chars:
            return chat
        chat.append({"role": "assistant", "content": record[answered]})
    raise BenchError(f"{file} has fewer than {num_chars} characters behind line {skip}; ask for shorter prompts")


def main() -> None:
    """Score the windows and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--texts", nargs="+", required=True, help="NAME=FILE:ASKED,ANSWERED")
    parser.add_argument("--chars", nargs="+", type=int, default=[7_000, 14_000, 28_000], help="of a prompt")
    parser.add_argument("--first", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--last", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=16_384)
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.target)
    models = [load_decoder(name) for name in (args.target, args.draft)]
    target, draft = (plain_runner(model, max_model_len=args.max_model_len) for model in models)
    ends = end_token_ids(models[0], tokenizer)
    for wanted in args.texts:
        for skip, num_chars in enumerate(args.chars):
            prompt = encode_chat(tokenizer, messages(wanted, num_chars, 100 * skip))
            answer = answer_of(target, prompt, args.answer_tokens, ends)
            windows = [(first, last) for last in args.last for first in args.first]
            line = {
                "benchmark": "draft_window",
                "text": wanted.partition("=")[0],
                "prompt_tokens": len(prompt),
                "answer_tokens": len(answer),
                "agreed_whole": num_agreed(draft, prompt, answer),
                "agreed": {f"{a}+{b}": num_agreed(draft, windowed(prompt, a, b), answer) for a, b in windows},
                **options.describe_run(),
            }
            print(json.dumps(line), flush=True)
            if args.out:
                options.append_lines(args.out, [line])


def _run(runner: LanguageModel, slot: int, token_ids: Sequence[int], count: int) -> list[int]:
    held = runner.num_rows(slot)
    parents = range(held - 1, held - 1 + len(token_ids))
    (logits,) = runner.forward([Extension(slot, token_ids, parents, len(token_ids) - count)])
    return [int(one) for one in np.argmax(as_array(logits), axis=1)]


if __name__ == "__main__":
    main()
