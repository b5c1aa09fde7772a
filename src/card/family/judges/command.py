"""`card train judge`: AutoJudge for one pair."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Hashable, Sequence
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
from card.family.judges.programs import check_fence, read_tasks
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
    questions, result_of, result = _asked(prompts, run_tests, max_prompts)
    pair = load_training_pair(options)
    miner = Miner(
        pair.runner,
        pair.draft,
        answer_of=lambda idx, token_ids: result_of(idx, str(pair.tokenizer.decode(list(token_ids)))),
        max_tokens=options["max_tokens"],
        end_ids=pair.end_ids,
    )
    prompt_ids = encode_questions(pair.tokenizer, questions, miner.max_prompt_tokens)
    of_pair = PairFacts.of(pair.runner, pair.draft_name)
    facts = {"target": key_of(of_pair.probe.tolist()), "draft": of_pair.draft}
    facts |= {name: options[name] for name in ("dtype", "max_tokens")}
    kept = KeptLines(out.with_suffix(".mined.jsonl"), facts)
    until = float("inf") if max_seconds is None else time.monotonic() + max_seconds
    with progress_bar() as progress:
        mined = _mine(progress, miner, prompt_ids, kept, lambda: time.monotonic() > until)
    trained = train_judge(Mismatches.joined(mined), of_pair)
    trained.judge.save(out, {**trained.figures(), "num_prompts": str(len(mined))})
    if len(mined) == len(prompt_ids):
        kept.delete()
    say(
        f"{trained.num_important:,} of {trained.num_mismatches:,} mismatches in {len(mined):,} of {len(prompt_ids):,}"
        f" prompts changed {result}. On prompts that it had not learnt from the judge tells them apart with an"
        f" area under the ROC curve of {trained.area:.2f} ({trained.area_range[0]:.2f} to {trained.area_range[1]:.2f});"
        f" 0.5 is chance. A knob of {trained.judge.usual:.3g} keeps out {RECALL:.0%} of the important ones, and"
        f" tolerates {trained.kept_share:.0%} of the others. Written to {out}"
    )


def _asked(
    prompts: Path | None, run_tests: bool, most: int | None
) -> tuple[Sequence[str], Callable[[int, str], Hashable], str]:
    """Return the questions, what makes the result of an answer to one of them, and the result's name.

    Raises: CardError for a file that cannot be read, or programs that cannot be fenced.
    """
    if not run_tests:
        return questions_in(prompts, most), lambda _, answer: final_number(answer), "the final number"
    if prompts is None:
        raise SettingsError("--run-tests needs --prompts, a file of tasks in the form of MBPP or HumanEval")
    tasks = read_tasks(prompts)[:most]
    check_fence()
    return [task.question for task in tasks], lambda idx, answer: tasks[idx].outcome(answer), "which tests pass"


def _mine(
    progress: Progress, miner: Miner, prompt_ids: Sequence[Sequence[int]], kept: KeptLines, is_over: Callable[[], bool]
) -> list[Mined]:
    """Return the mismatches of all prompts for which there is time; stored ones are not mined again."""
    keys = [key_of(list(ids)) for ids in prompt_ids]
    found = {idx: _read(idx, kept, key) for idx, key in enumerate(keys) if key in kept.found}
    advance = advancing(progress, "trying mismatches", len(prompt_ids), len(found))
    for one in miner.mine([(idx, ids) for idx, ids in enumerate(prompt_ids) if idx not in found], is_over):
        found[one.prompt_idx] = one
        states = base64.b64encode(one.features.numpy().tobytes()).decode()
        kept.add(keys[one.prompt_idx], [one.is_important, states])
        advance()
    return list(found.values())


def _read(prompt_idx: int, kept: KeptLines, key: str) -> Mined:
    try:
        labels, states = kept.found[key]
        numbers = np.frombuffer(base64.b64decode(states), dtype=np.float32).copy()
        features = torch.from_numpy(numbers).view(len(labels), -1) if labels else torch.zeros((0, 0))
        return Mined(prompt_idx, features, tuple(bool(label) for label in labels))
    except (ValueError, TypeError, RuntimeError) as error:
        raise kept.damage(error) from error
