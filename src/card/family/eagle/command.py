"""`card train eagle`: a head that drafts from states of three layers of its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from card.cli.parts.files import read_prompts
from card.errors import ModelError
from card.family.eagle.train_eagle import EagleTrainSettings, target_layers, train_eagle
from card.family.learning.driver import TrainingTarget, encode_questions
from card.family.learning.heads_command import train_on_own_texts
from card.models.features import FINAL
from card.models.runner import ExactRunner


def run(
    *,
    data: Path,
    max_prompts: int | None,
    out: Path,
    draft_vocab: int,
    mlp_width: int | None,
    epochs: int,
    seed: int,
    **options: Any,
) -> None:
    """Run `card train eagle`. Raises: CardError of any kind."""
    settings = EagleTrainSettings(num_tokens=draft_vocab, mlp_width=mlp_width, epochs=epochs, seed=seed)
    questions = read_prompts(data)[:max_prompts]

    def prompts_for(target: TrainingTarget) -> list[list[int]]:
        if not isinstance(target.runner, ExactRunner):
            raise ModelError(f"a head drafts for targets that run in our own pass, and {target.name} does not")
        return encode_questions(target.tokenizer, questions, target.runner.max_model_len - 1)

    train_on_own_texts(
        settings,
        train_eagle,
        prompts_for,
        out=out,
        seed=seed,
        examples="texts",
        whole=True,
        layers_for=lambda target: (*target_layers(target.runner.original.num_layers), FINAL),
        dtype=torch.bfloat16,
        **options,
    )
