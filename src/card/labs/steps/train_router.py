"""Train a router: both models write every step, a checker says which is better, and a regression learns to predict it.

The answer continues from the better step, or from the draft model's if they are equal. Source: Arbitrage,
arXiv:2512.05033. The paper drops examples of the commoner kind; a regression with a knob needs no balance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from card.api.llm import LLM
from card.config import SamplingParams
from card.errors import PromptError
from card.family.learning.regression import area_under_roc, cross_validate, fit_ridge
from card.labs.steps.arbitrage import Arbitrage
from card.labs.steps.rewards import Reward
from card.labs.steps.routers import OracleRouter, Step
from card.labs.steps.trained import FEATURES, RouterPair, TrainedRouter, describe
from card.text.kept_lines import KeptLines, key_of

Example = tuple[str, bool, list[float]]
"""(question, whether the target's step was better, features of the draft model's)."""
BATCH = 8  # questions at once
LEAST_OF_A_KIND = 5  # steps, both of those where the target's was better and of the others


@dataclass(frozen=True, slots=True)
class TrainedSteps:
    """A router, and its quality on steps of held-out questions."""

    router: TrainedRouter
    num_steps: int
    num_better: int  # steps of which the target's was better
    area: float  # under the ROC curve: 0.5 is chance, 1 is perfect
    entropy_area: float  # of the first token's entropy alone

    def figures(self) -> dict[str, str]:
        """Return these figures by name, for a file's metadata."""
        counts = {"num_steps": str(self.num_steps), "num_better": str(self.num_better)}
        return {**counts, "area_under_roc": f"{self.area:.4f}", "entropy_area": f"{self.entropy_area:.4f}"}


class StepRecorder(OracleRouter):
    """An oracle that records its examples; a router for `Arbitrage`."""

    def __init__(self, reward: Reward) -> None:
        """Use this checker."""
        super().__init__(1.0, reward)
        self.found: list[Example] = []

    def keeps(self, drafted: Step, targets: Step | None) -> bool:
        """Return whether the draft model's step is as good as the target's."""
        is_kept = super().keeps(drafted, targets)
        self.found.append((drafted.question, not is_kept, describe(drafted).tolist()))
        return is_kept


def collect_steps(
    target: LLM,
    draft: LLM,
    solutions: Mapping[str, str],
    reward: Reward,
    path: Path,
    *,
    max_tokens: int,
    on_answer: Callable[[int], None] = lambda _: None,
) -> list[Example]:
    """Let both models write the steps of all questions. Each batch is kept in a file, from which a later call resumes.

    A later call may have more questions, after the same first ones.

    Args:
        solutions: of each question; a changed one is compared again.
        reward: decides which step is better.
        path: of that file, which is not removed.
        on_answer: called with the number of finished questions.
    Raises: ModelError if the file is damaged or of another run.
    """
    questions = list(solutions)
    facts = {
        "target": Path(target.settings.target).name,
        "draft": Path(draft.settings.target).name,
        "max_tokens": max_tokens,
        "features": list(FEATURES),
    }
    kept, found = KeptLines(path, facts), list[Example]()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens).resolved()
    for first in range(0, len(questions), BATCH):
        batch = questions[first : first + BATCH]
        key = key_of([(one, solutions[one]) for one in batch])
        if key not in kept.found:
            for one in (target, draft):
                one.reset_prefix_cache()  # so that the last bits of a batch do not depend on earlier batches
            recorder = StepRecorder(reward)
            Arbitrage(target, draft, recorder).answer(batch, params)
            kept.add(key, recorder.found)
        try:
            found += [_example(*one) for one in kept.found[key]]
        except (ValueError, TypeError) as error:
            raise kept.damage(error) from error
        on_answer(first + len(batch))
    return found


def train_router(found: Sequence[Example], pair: RouterPair) -> TrainedSteps:
    """Return the router trained on these steps. Raises: PromptError if there are too few of one kind."""
    labels = torch.tensor([is_better for _, is_better, _ in found], dtype=torch.bool)
    num_better = int(labels.sum())
    if not LEAST_OF_A_KIND <= num_better <= len(labels) - LEAST_OF_A_KIND:
        raise PromptError(
            f"the target's step was better in {num_better} of {len(labels)} cases, and a router needs {LEAST_OF_A_KIND}"
            " of these and as many others; give more prompts"
        )
    inputs: Tensor = torch.tensor([features for _, _, features in found], dtype=torch.float64)
    numbers = {question: idx for idx, question in enumerate(dict.fromkeys(question for question, _, _ in found))}
    checked = cross_validate(inputs, labels, torch.tensor([numbers[question] for question, _, _ in found]))
    weights, bias = fit_ridge(inputs, labels, checked.ridge)
    usual = float(checked.scores.quantile(1.0 - num_better / len(labels)).sigmoid())
    return TrainedSteps(
        router=TrainedRouter(weights, bias, usual=usual, pair=pair, knob=None),
        num_steps=len(labels),
        num_better=num_better,
        area=checked.area,
        entropy_area=area_under_roc(inputs[:, 0], labels),
    )


def _example(question: str, is_better: bool, features: list[float]) -> Example:
    return str(question), bool(is_better), [float(one) for one in features]
