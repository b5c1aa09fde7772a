"""`card train router`: a router of steps for one pair."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from card.cli.parts.files import read_records
from card.cli.parts.tables import progress_bar
from card.errors import PromptError
from card.family.learning.driver import check_out, say, stepping
from card.labs.steps.command import open_pair
from card.labs.steps.named_routers import ROUTER
from card.labs.steps.rewards import SolutionReward
from card.labs.steps.train_router import collect_steps, train_router
from card.labs.steps.trained import RouterPair
from card.text.answers import final_number


def run(*, data: Path, max_prompts: int | None, out: Path, seed: int, max_tokens: int, **options: Any) -> None:
    """Run `card train router`. Raises: CardError of any kind."""
    ROUTER.check_file(out)
    check_out(out)
    records = list(read_records(data, "question", "answer"))
    for number, one in enumerate(records, 1):
        if final_number(one["answer"]) is None:
            raise PromptError(f"{data}: answer {number} has no number to check against; leave that line out")
    random.Random(seed).shuffle(records)
    solutions = {one["question"]: one["answer"] for one in records[:max_prompts]}
    reward, kept = SolutionReward(solutions), out.with_suffix(".steps.jsonl")
    with open_pair({**options, "dtype": "float32"}) as (target, draft):
        with progress_bar() as progress:
            on_answer = stepping(progress, "comparing steps", len(solutions))
            found = collect_steps(target, draft, solutions, reward, kept, max_tokens=max_tokens, on_answer=on_answer)
        trained = train_router(found, RouterPair.of(target.host.runner, draft.host.runner))
    trained.router.save(out, trained.figures())
    kept.unlink()
    say(
        f"the target's step was better in {trained.num_better:,} of {trained.num_steps:,} cases. On questions that it"
        f" had not learnt from the router tells them apart with an area under the ROC curve of {trained.area:.2f}; the"
        f" first token's entropy alone with {trained.entropy_area:.2f}, and 0.5 is chance. The usual knob is"
        f" {trained.router.usual:.3g}. Written to {out}"
    )
