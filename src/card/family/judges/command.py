"""`card train judge`: AutoJudge for one pair."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from card.cli.parts.tables import progress_bar
from card.errors import SettingsError
from card.family.judges.auto import PairFacts
from card.family.judges.knobs import JUDGE
from card.family.judges.mining import Mined, Miner, Mismatches
from card.family.judges.programs import check_fence, has_whole_program, read_tasks
from card.family.judges.train_judge import RECALL, train_judge
from card.family.learning.driver import advancing, check_out, encode_questions, load_training_pair, questions_in, say
from card.text.answers import final_number
from card.text.kept_lines import KeptLines, key_of


def run(
    *,
    prompts: Path | None,
    run_tests: bool,
    max_prompts: int | None,
    max_seconds: int | None,
    out: Path,
    **options: Any,
) -> None:
    """Run `card train judge`. Raises: CardError of any kind."""
    JUDGE.check_file(out)
    check_out(out)
    asked = _asked(prompts, run_tests, max_prompts)
    pair = load_training_pair(options)

    def text_of(token_ids: Sequence[int]) -> str:
        return str(pair.tokenizer.decode(list(token_ids)))

    miner = Miner(
        pair.runner,
        pair.draft,
        answer_of=lambda idx, token_ids: asked.result_of(idx, text_of(token_ids)),
        max_tokens=options["max_tokens"],
        end_ids=pair.end_ids,
        is_decided=lambda token_ids: asked.is_decided(text_of(token_ids)),
    )
    prompt_ids = encode_questions(pair.tokenizer, asked.questions, miner.max_prompt_tokens)
    of_pair = PairFacts.of(pair.runner, pair.draft_name)
    facts = {"target": key_of(of_pair.probe.tolist()), "draft": of_pair.draft}
    facts |= {name: options[name] for name in ("dtype", "max_tokens")}
    kept = KeptLines(out.with_suffix(".mined.jsonl"), facts)
    until = float("inf") if max_seconds is None else time.monotonic() + max_seconds
    with progress_bar() as progress:
        mined = _mine(progress, miner, prompt_ids, kept, lambda: time.monotonic() > until)
    trained = train_judge(Mismatches.joined(mined), of_pair)
    num_mined = sum(one.is_important is None for one in mined)
    trained.judge.save(out, {**trained.figures(), "num_prompts": str(num_mined)})
    if sum(one.is_last for one in mined) == len(prompt_ids):
        kept.delete()
    say(
        f"{trained.num_important:,} of {trained.num_mismatches:,} mismatches in {num_mined:,} of {len(prompt_ids):,}"
        f" prompts changed {asked.result}. On prompts that it had not learnt from the judge tells them apart with an"
        f" area under the ROC curve of {trained.area:.2f} ({trained.area_range[0]:.2f} to {trained.area_range[1]:.2f});"
        f" 0.5 is chance. A knob of {trained.judge.usual:.3g} keeps out {RECALL:.0%} of the important ones, and"
        f" tolerates {trained.kept_share:.0%} of the others. Written to {out}"
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The questions, and what is compared of their answers."""

    questions: Sequence[str]
    result_of: Callable[[int, str], Hashable]  # of an answer to the question of this index
    result: str  # its name
    is_decided: Callable[[str], bool] = lambda _: False  # no more text changes the result


def _asked(prompts: Path | None, run_tests: bool, most: int | None) -> _Asked:
    """Return what is asked. Raises: CardError for a file that cannot be read, or programs that cannot be fenced."""
    if not run_tests:
        return _Asked(questions_in(prompts, most), lambda _, answer: final_number(answer), "the final number")
    if prompts is None:
        raise SettingsError("--run-tests needs --prompts, a file of tasks in the form of MBPP or HumanEval")
    tasks = read_tasks(prompts)[:most]
    check_fence()
    questions = [task.question for task in tasks]
    return _Asked(questions, lambda idx, answer: tasks[idx].outcome(answer), "which tests pass", has_whole_program)


def _mine(
    progress: Progress, miner: Miner, prompt_ids: Sequence[Sequence[int]], kept: KeptLines, is_over: Callable[[], bool]
) -> list[Mined]:
    """Return the outcomes for which there is time; each is stored at once, and stored ones are not mined again."""
    keys = [key_of(list(ids)) for ids in prompt_ids]
    found = {idx: list(_stored(idx, kept, key)) for idx, key in enumerate(keys)}
    earlier = {idx: outcomes[-1] for idx, outcomes in found.items() if outcomes}
    num_done = sum(one.is_last for one in earlier.values())
    advance = advancing(progress, "trying mismatches", len(prompt_ids), num_done)
    for one in miner.mine(list(enumerate(prompt_ids)), is_over, earlier=earlier):
        outcomes = found[one.prompt_idx]
        states = None if one.features is None else base64.b64encode(one.features.numpy().tobytes()).decode()
        kept.add(f"{keys[one.prompt_idx]}.{len(outcomes)}", [one.answer_ids, one.place, one.is_important, states])
        outcomes.append(one)
        if one.is_last:
            advance()
    return [one for outcomes in found.values() for one in outcomes]


def _stored(prompt_idx: int, kept: KeptLines, key: str) -> Iterator[Mined]:
    """Yield the outcomes of a prompt that an earlier run stored, in their order."""
    for number in itertools.count():
        if (name := f"{key}.{number}") not in kept.found:
            return
        try:
            answer_ids, place, label, states = kept.found[name]
            features = None
            if label is not None:
                numbers = np.frombuffer(base64.b64decode(states, validate=True), dtype=np.float32)
                features = torch.from_numpy(numbers.copy())
            if not 0 <= place <= len(answer_ids):
                raise ValueError(f"place {place} of {len(answer_ids)} tokens")
            yield Mined(prompt_idx, tuple(map(int, answer_ids)), place, label, features)
        except (ValueError, TypeError) as error:
            raise kept.damage(error) from error
