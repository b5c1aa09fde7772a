"""`card train judge` and `card train reward`: AutoJudge or a reward of steps for one pair."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from card.cli.parts.files import read_records
from card.cli.parts.tables import progress_bar
from card.errors import PromptError
from card.family.judges.auto import AutoJudge, PairFacts
from card.family.judges.knobs import JUDGE, REWARD
from card.family.judges.mining import Mined, Miner, Mismatches, StepMiner
from card.family.judges.steps import StepReward, step_ends
from card.family.judges.train_judge import RECALL, TrainedJudge, train_judge
from card.family.learning.driver import advancing, check_out, encode_questions, load_training_pair, questions_in, say
from card.text.answers import final_number
from card.text.kept_lines import KeptLines, key_of


@dataclass(frozen=True, slots=True)
class _Lessons:
    """The prompts of a training, and what is compared of their answers."""

    questions: Sequence[str]
    result_of: Callable[[int, str], Hashable]  # of an answer to the question of this index
    result: str  # its name
    known: Sequence[str] = ()  # the right answer of each, if it is compared with


def run(*, prompts: Path | None, max_prompts: int | None, out: Path, **options: Any) -> None:
    """Run `card train judge`. Raises: CardError of any kind."""
    JUDGE.check_file(out)
    check_out(out)
    questions = questions_in(prompts, max_prompts)
    lessons = _Lessons(questions, lambda _, answer: final_number(answer), "the final number")
    trained, counts = _train(lessons, out, options)
    say(f"{counts} changed {lessons.result}. {_quality(trained, 'prompts')} Written to {out}")


def run_reward(*, data: Path, max_prompts: int | None, out: Path, **options: Any) -> None:
    """Run `card train reward`. Raises: CardError of any kind."""
    REWARD.check_file(out)
    check_out(out)
    lessons = _problems(data, max_prompts)
    trained, counts = _train(lessons, out, options)
    say(f"{counts} with a drafted step lost {lessons.result}. {_quality(trained, 'problems')} Written to {out}")


def _train(lessons: _Lessons, out: Path, options: dict[str, Any]) -> tuple[TrainedJudge, str]:
    """Mine, train and write the file; return what was learnt, and the counts in words. Raises: CardError."""
    pair, max_seconds = load_training_pair(options), options["max_seconds"]

    def text_of(token_ids: Sequence[int]) -> str:
        return str(pair.tokenizer.decode(list(token_ids)))

    ends: dict[str, Any] = {}
    if lessons.known:
        ends = {"ends": step_ends(lambda one: text_of([one]), pair.runner.vocab_size, pair.end_ids)}
    miner = (partial(StepMiner, step_ends=ends["ends"]) if ends else Miner)(
        pair.runner,
        pair.draft,
        answer_of=lambda idx, token_ids: lessons.result_of(idx, text_of(token_ids)),
        max_tokens=options["max_tokens"],
        end_ids=pair.end_ids,
    )
    prompt_ids = encode_questions(pair.tokenizer, lessons.questions, miner.max_prompt_tokens)
    of_pair = PairFacts.of(pair.runner, pair.draft_name)
    facts = {"target": key_of(of_pair.probe.tolist()), "draft": of_pair.draft}
    facts |= {name: options[name] for name in ("dtype", "max_tokens")}
    keys = [key_of([ids, *lessons.known[idx : idx + 1]]) for idx, ids in enumerate(prompt_ids)]
    lines = KeptLines(out.with_suffix(".mined.jsonl"), facts)
    until = float("inf") if max_seconds is None else time.monotonic() + max_seconds
    with progress_bar() as progress:
        mined = _mine(progress, miner, prompt_ids, keys, lines, of_pair.width, lambda: time.monotonic() > until)
    trained = train_judge(Mismatches.joined(mined), of_pair, StepReward if ends else AutoJudge, **ends)
    num_mined = sum(one.is_important is None for one in mined)
    trained.judge.save(out, {**trained.figures(), "num_prompts": str(num_mined)})
    if sum(one.is_last for one in mined) == len(prompt_ids):
        lines.delete()
    of_prompts = f"in {num_mined:,} of {len(prompt_ids):,} prompts"
    return trained, f"{trained.num_important:,} of {trained.num_mismatches:,} mismatches {of_prompts}"


def _quality(trained: TrainedJudge, prompts: str) -> str:
    return (
        f"On {prompts} that it had not learnt from the {trained.judge.FILE.kind} tells them apart with an area under"
        f" the ROC curve of {trained.area:.2f} ({trained.area_range[0]:.2f} to {trained.area_range[1]:.2f}); 0.5 is"
        f" chance. A knob of {trained.judge.usual:.3g} keeps out {RECALL:.0%} of the important ones, and tolerates"
        f" {trained.kept_share:.0%} of the others."
    )


def _problems(data: Path, most: int | None) -> _Lessons:
    """Return the problems of a file, with their answers. Raises: PromptError for an answer without a number."""
    records = read_records(data, "question", "answer")[:most]
    numbers = [final_number(one["answer"]) for one in records]
    if None in numbers:
        raise PromptError(f"{data}: answer {numbers.index(None) + 1} has no number to check against; leave it out")
    return _Lessons(
        [one["question"] for one in records],
        lambda idx, answer: final_number(answer) == numbers[idx],
        "the right answer",
        known=[str(number) for number in numbers],
    )


def _mine(
    progress: Progress,
    miner: Miner,
    prompt_ids: Sequence[Sequence[int]],
    keys: Sequence[str],
    lines: KeptLines,
    width: int,
    is_over: Callable[[], bool],
) -> list[Mined]:
    """Return the outcomes for which there is time; each is stored at once, and stored ones are not mined again.

    Args:
        width: of the target's states.
    """
    outcomes = {idx: list(_stored(idx, lines, key, width)) for idx, key in enumerate(keys)}
    earlier = {idx: mined[-1] for idx, mined in outcomes.items() if mined}
    num_done = sum(one.is_last for one in earlier.values())
    advance = advancing(progress, "trying mismatches", len(prompt_ids), num_done)
    for one in miner.mine(list(enumerate(prompt_ids)), is_over, earlier=earlier):
        of_prompt = outcomes[one.prompt_idx]
        states = None if one.features is None else base64.b64encode(one.features.numpy().tobytes()).decode()
        lines.add(f"{keys[one.prompt_idx]}.{len(of_prompt)}", [one.answer_ids, one.place, one.is_important, states])
        of_prompt.append(one)
        if one.is_last:
            advance()
    return [one for mined in outcomes.values() for one in mined]


def _stored(prompt_idx: int, lines: KeptLines, key: str, width: int) -> Iterator[Mined]:
    """Yield the outcomes of a prompt that an earlier run stored, in their order."""
    for number in itertools.count():
        if (name := f"{key}.{number}") not in lines.found:
            return
        try:
            answer_ids, place, label, states = lines.found[name]
            features = None
            if label is not None:
                numbers = np.frombuffer(base64.b64decode(states, validate=True), dtype=np.float32)
                features = torch.from_numpy(numbers.copy())
                if numbers.shape != (width,) or not np.isfinite(numbers).all():
                    raise ValueError(f"{len(numbers)} numbers of a state, {width} finite ones are right")
            if place not in range(len(answer_ids) + 1):
                raise ValueError(f"place {place} of {len(answer_ids)} tokens")
            yield Mined(prompt_idx, tuple(map(int, answer_ids)), place, label, features)
        except (ValueError, TypeError) as error:
            raise lines.damage(error) from error
