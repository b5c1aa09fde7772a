"""What do judges earn and cost on questions that can be checked: tokens a pass, answers that are right, or stay?

Answers to word problems in GSM8K's form are right if the final number is. All is greedy, by sequential speculation, in
batches. One line of JSON for each batch and judge, judges inside batches: a run that was cut
off, or out of --minutes, goes on where it ended if the same command is given again, and what is there compares all
judges on the same questions.

    python benchmarks/family/judges.py --target qwen-1.5b.gguf --draft qwen-0.5b.gguf --data gsm8k=gsm8k_test.jsonl \
        --judge exact,typical,relaxed,kl,fly --limit 48 --out benchmarks/results/judges.jsonl

Beside judges, ``arbitrage/reward.safetensors:0.5`` is method arbitrage with a learned reward.
``arbitrage/equations:0.3`` and ``arbitrage/chance:0.5`` have one that learns nothing; ``draft`` is that model alone.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import options
from step_judges import StepVerifier
from word_problems import read_items

from card.api.llm import LLM
from card.config import SamplingParams
from card.errors import BenchError, CardError, SettingsError
from card.family.judges.knobs import parse_judge, parse_reward
from card.family.judges.steps import STEP_END
from card.models.facts import end_token_ids, vocab_size
from card.models.loading import load_decoder, load_tokenizer
from card.text.answers import final_number
from card.text.prompts import encode_chat
from card.text.tokenizer import Tokenizer
from card.tools.bench.summary import Share

BENCHMARK = "judges"
EXACT, DRAFT, STEPS = "exact", "draft", "arbitrage/"
_UNLEARNT = ("equations", "chance")  # rewards of steps
_SAME = ("target", "draft", "dtype", "max_tokens", "num_speculative_tokens", "lead", "limit", "at_once", "plain")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question whose answer can be checked."""

    prompt: str
    wanted: str  # the right number


@dataclass(frozen=True, slots=True)
class Batch:
    """Some problems of a data set, answered at once."""

    data: str
    first: int
    problems: Sequence[Problem]


def read_batches(data: Sequence[str], limit: int, at_once: int, *, is_plain: bool = False) -> list[Batch]:
    """Return the batches of "gsm8k=FILE", those of several sets in turns. Raises: CardError.

    Args:
        is_plain: whether problems are asked alone, without an instruction.
    """
    by_set = []
    for one in data:
        name, _, path = one.partition("=")
        if not path:
            raise SettingsError(f"--data must be NAME=FILE, such as gsm8k=gsm8k_test.jsonl, got {one!r}")
        problems = _word_problems(Path(path), limit, is_plain)
        by_set.append([Batch(name, at, problems[at : at + at_once]) for at in range(0, len(problems), at_once)])
    longest = max(map(len, by_set))
    return [batches[i] for i in range(longest) for batches in by_set if i < len(batches)]


def _word_problems(path: Path, limit: int, is_plain: bool) -> list[Problem]:
    items = read_items(path, limit)
    asked = [one.question if is_plain else one.prompt for one in items]
    return [Problem(text, f"{one.answer.normalize():f}") for text, one in zip(asked, items, strict=True)]


def _number_in(answer: str) -> str | None:
    number = final_number(answer)
    return None if number is None else f"{number.normalize():f}"


def read_judges(text: str) -> list[str]:
    """Return the judges of "exact,relaxed:0.5", the exact verifier first. Raises: SettingsError for an unknown one."""
    named = [one.strip() for one in text.split(",") if one.strip()]
    for one in named:
        if one.startswith(STEPS):
            kind, _, knob = one.removeprefix(STEPS).partition(":")
            if kind not in _UNLEARNT:
                parse_reward(one.removeprefix(STEPS))
            elif not knob.replace(".", "", 1).isdigit():
                raise SettingsError(f"{one} needs a knob from 0 to 1, such as {STEPS}{kind}:0.5")
        elif one not in (EXACT, DRAFT):
            parse_judge(one)
    return list(dict.fromkeys([EXACT, *named]))


class Pair:
    """Two models, loaded once, and an engine for each judge, made when it is first asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the models. Raises: CardError."""
        self.tokenizer = load_tokenizer(args.target)
        self._models = [load_decoder(name, dtype=args.dtype) for name in (args.target, args.draft)]
        self._lengths = {"num_speculative_tokens": args.num_speculative_tokens}, {"lead": args.lead}
        self._common: dict[str, Any] = {"max_num_seqs": args.at_once, "policy": "fixed"}
        self._step_verifiers: dict[str, StepVerifier] = {}
        self._params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, logprobs=1).resolved()
        self._llms: dict[str, LLM] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def answer(self, judge: str, batch: Batch) -> dict[str, Any]:
        """Answer a batch and return its line. Raises: CardError."""
        llm = self._llm(judge)
        prompts = [encode_chat(self.tokenizer, [{"role": "user", "content": one.prompt}]) for one in batch.problems]
        started, cpu_started = time.perf_counter(), time.process_time()
        if judge in self._step_verifiers:
            outputs = [self._one_answer(llm, judge, one) for one in prompts]
        else:
            outputs = llm.generate(prompts, self._params)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        items = [
            _item(problem, output, self.tokenizer) for problem, output in zip(batch.problems, outputs, strict=True)
        ]
        line = {"benchmark": BENCHMARK, "data": batch.data, "judge": judge, "first": batch.first}
        line["exact"] = llm.is_exact and judge != DRAFT
        return {**line, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2), "items": items}

    def _one_answer(self, llm: LLM, judge: str, prompt: Any) -> Any:
        self._step_verifiers[judge].begin()
        return llm.generate([prompt], self._params)[0]

    def _llm(self, judge: str) -> LLM:
        if judge not in self._llms:
            llm = LLM(**self._arguments(judge), tokenizer=self.tokenizer, **self._common)
            self._llms[judge] = self._stack.enter_context(llm)
        return self._llms[judge]

    def _arguments(self, judge: str) -> dict[str, Any]:
        """Return the models and the settings of a row."""
        (target, draft), (chain, step) = self._models, self._lengths
        if judge == DRAFT:
            return {"target": draft, "method": "vanilla"}
        pair = {"target": target, "draft": draft, "placement": "inline"}
        reward = judge.removeprefix(STEPS)
        kind, _, knob = reward.partition(":")
        if kind in _UNLEARNT:
            ends = end_token_ids(target, self.tokenizer)
            verifier = StepVerifier(kind, float(knob), self.tokenizer, vocab_size(target), ends)
            self._step_verifiers[judge] = verifier
            length = {"num_speculative_tokens": step["lead"]}
            return {**pair, "method": "sps", **length, "verifier": verifier, "allows_inexact": True}
        if judge.startswith(STEPS):
            return {**pair, "method": "arbitrage", **step, "reward": reward}
        return {**pair, "method": "sps", **chain, **({} if judge == EXACT else {"judge": judge})}


def _steps(output: Any, tokenizer: Tokenizer) -> list[bool]:
    """Return for each line of an answer whether it has a token that is not the target's choice."""
    lines = [[False]]
    for token_id, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        lines[-1].append(token_id != logprobs.top[0][0])
        if STEP_END in str(tokenizer.decode([token_id])):
            lines.append([])
    return [any(line) for line in lines if line]


def _item(problem: Problem, output: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    if output.error is not None:
        raise output.error
    answer, stats = output.outputs[0], output.stats
    steps = _steps(answer, tokenizer)
    found = _number_in(answer.text)
    return {
        "found": found,
        "is_solved": found == problem.wanted,
        "tokens": len(answer.token_ids),
        "finish": answer.finish_reason,
        "passes": stats.target_passes,
        "verified": stats.verified_tokens,
        "accepted": stats.accepted_tokens,
        "lenient": stats.lenient_tokens,
        "steps": len(steps),
        "drafted_steps": sum(steps),
        "text_sha256": hashlib.sha256(answer.text.encode()).hexdigest()[:16],
    }


@dataclass(frozen=True, slots=True)
class JudgeRow:
    """What a judge came to on the questions of a data set that every judge has answered."""

    data: str
    judge: str
    num_questions: int
    tokens_per_pass: float
    num_lenient: int  # tokens kept against the target's choice
    num_tokens: int
    num_cut_off: int
    num_passes: int  # of the target
    num_steps: int
    num_drafted_steps: int  # that have a token against the target's choice
    solved: Share
    same: Share  # of texts with the result of exact decoding


def summarise(lines: Sequence[dict[str, Any]]) -> Iterator[JudgeRow]:
    """Yield a row for each data set and judge, the exact one first; none for a set without a question of all judges."""
    for data in dict.fromkeys(line["data"] for line in lines):
        own = [line for line in lines if line["data"] == data]
        judges = list(dict.fromkeys(line["judge"] for line in own))
        by_judge = {judge: {line["first"]: line["items"] for line in own if line["judge"] == judge} for judge in judges}
        shared = sorted(set.intersection(*(set(found) for found in by_judge.values())))
        exact = [item for first in shared for item in by_judge[judges[0]][first]]
        for judge in judges if shared else []:
            items = [item for first in shared for item in by_judge[judge][first]]
            num = {name: sum(item[name] for item in items) for name in ("passes", "accepted", "lenient", "tokens")}
            num |= {name: sum(item.get(name, 0) for item in items) for name in ("steps", "drafted_steps")}
            same = sum(item["found"] == other["found"] for item, other in zip(items, exact, strict=True))
            yield JudgeRow(
                data=data,
                judge=judge,
                num_questions=len(items),
                tokens_per_pass=1 + num["accepted"] / max(1, num["passes"]),
                num_lenient=num["lenient"],
                num_tokens=num["tokens"],
                num_passes=num["passes"],
                num_steps=num["steps"],
                num_drafted_steps=num["drafted_steps"],
                num_cut_off=sum(item["finish"] == "length" for item in items),
                solved=Share(sum(item["is_solved"] for item in items), len(items)),
                same=Share(same, len(items)),
            )


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of a Markdown table, over the questions that every judge of a data set has answered."""
    yield (
        "| data | judge | tokens a pass | kept against the target's choice | cut off | passes "
        "| steps by the draft model | solved, % | same as exact, % |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in summarise(lines):
        kept = f"{row.num_lenient} of {row.num_tokens:,} tokens"
        steps = f"{row.num_passes:,} | {row.num_drafted_steps} of {row.num_steps}"
        shares = f"{row.num_cut_off} | {steps} | {row.solved} | {row.same}"
        yield f"| {row.data}, {row.num_questions} | `{row.judge}` | {row.tokens_per_pass:.2f} | {kept} | {shares} |"


def _earlier(path: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of an earlier part of the same run. Raises: BenchError if they are of another one."""
    if not path.exists() or not path.stat().st_size:
        return []
    lines = options.read_lines(path, BENCHMARK)
    for name in _SAME:
        if others := {line.get(name) for line in lines} - {asked[name]}:
            raise BenchError(
                f"{path} has lines with {name} {others.pop()!r}, asked for is {asked[name]!r}; name another"
            )
    return lines


def run(args: argparse.Namespace) -> None:
    """Answer what is missing, and print the table. Raises: CardError."""
    judges = read_judges(args.judge)
    if args.at_once < 1:
        raise SettingsError(f"--at-once must be 1 or more, got {args.at_once}")
    batches = read_batches(args.data, args.limit, args.at_once, is_plain=args.plain)
    asked = {name: getattr(args, name) for name in _SAME} | {
        n: Path(getattr(args, n)).name for n in ("target", "draft")
    }
    lines = _earlier(args.out, asked)
    done = {(line["data"], line["first"], line["judge"]) for line in lines}
    missing = [(b, judge) for b in batches for judge in judges if (b.data, b.first, judge) not in done]
    until = time.monotonic() + 60 * args.minutes
    if missing:
        facts = options.describe_run()
        with Pair(args) as pair:
            for count, (batch, judge) in enumerate(missing, 1):
                if time.monotonic() > until:
                    print(f"out of time with {len(missing) - count + 1} left; the same command goes on", flush=True)
                    break
                line = {**pair.answer(judge, batch), **asked, **facts}
                options.append_lines(args.out, [line])
                lines.append(line)
                print(
                    f"{count} of {len(missing)}: {batch.data} {batch.first}, {judge}, {line['seconds']} s", flush=True
                )
    for row in report(lines):
        print(row)


def main() -> None:
    """Answer the questions under every judge, and print and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo-target", help="default: %(default)s")
    parser.add_argument("--draft", default="demo-draft", help="default: %(default)s")
    parser.add_argument("--data", action="append", required=True, help="gsm8k=FILE; may be given several times")
    parser.add_argument(
        "--judge", default="exact,typical,relaxed,kl,fly", help="default: %(default)s; also FILE and others"
    )
    parser.add_argument("--limit", type=int, default=48, help="questions of each set (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="questions in one batch (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512, help="most new tokens (default: %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, default=8, help="drafted a pass (default: %(default)s)")
    parser.add_argument("--lead", type=int, default=24, help="drafted a pass by arbitrage (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="ask the questions alone, without an instruction")
    parser.add_argument("--dtype", default="int8", help="of both models (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no batch after so many")
    parser.add_argument("--out", type=Path, required=True, help="file of lines; what it has is not done again")
    try:
        run(parser.parse_args())
    except CardError as error:
        raise SystemExit(f"judges.py: {error}") from None


if __name__ == "__main__":
    main()
