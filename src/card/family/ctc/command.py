"""`card train ctc`: a head that drafts from the target's hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from card.cli.parts.files import read_prompts
from card.family.ctc.train_ctc import CtcTrainSettings, labels_of, train_head
from card.family.learning.driver import TrainingTarget, encode_questions
from card.family.learning.heads_command import train_on_own_texts
from card.family.learning.target_texts import TargetTexts


def run(
    *,
    data: Path,
    max_prompts: int | None,
    out: Path,
    loss: str,
    slots: int,
    window: int,
    width: int,
    epochs: int,
    seed: int,
    **options: Any,
) -> None:
    """Run `card train ctc`. Raises: CardError of any kind."""
    sizes = {"num_slots": slots, "num_labels": labels_of(slots), "window": window, "width": width}
    settings = CtcTrainSettings(loss=loss, epochs=epochs, seed=seed, **sizes)  # type: ignore[arg-type]
    questions = read_prompts(data)[:max_prompts]

    def prompts_for(target: TrainingTarget) -> list[list[int]]:
        return encode_questions(target.tokenizer, questions, target.runner.max_model_len - 1)

    def train(target: TrainingTarget, texts: TargetTexts, settings: CtcTrainSettings, **run: Any) -> Any:
        return train_head(target.runner, texts, settings, **run)

    train_on_own_texts(settings, train, prompts_for, out=out, seed=seed, examples="rows", **options)
