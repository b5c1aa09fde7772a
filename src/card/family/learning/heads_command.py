"""The command that trains a drafting head: the target answers prompts, and the head learns from the answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from card.cli.parts.tables import progress_bar, table
from card.errors import SettingsError
from card.family.learning.bound_module import SavedHead
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.driver import TrainingTarget, advancing, check_out, load_target, say, stepping
from card.family.learning.head_training import TrainedHead
from card.family.learning.target_texts import KeptTexts, write_texts
from card.models.features import FINAL

_Head = TypeVar("_Head", bound=SavedHead)


def train_on_own_texts(
    settings: Any,
    train: Callable[..., TrainedHead[_Head]],
    prompts_for: Callable[[TrainingTarget], Sequence[Sequence[int]]],
    *,
    out: Path,
    seed: int,
    examples: str,
    whole: bool = False,
    layers_for: Callable[[TrainingTarget], tuple[int, ...]] = lambda target: (FINAL,),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """Let the target answer prompts, train a head on the answers, save it and print; resume an interrupted run.

    Args:
        settings: of the training.
        train: as `card.family.ctc.train_ctc.train_head`, of a `TrainingTarget`.
        prompts_for: returns the prompts' token ids.
        examples: word for the head's examples.
        whole: the head learns from the prompts, too.
        layers_for, dtype: which of the target's states it reads, and what they are kept in.
    Raises: CardError of any kind.
    """
    if out.exists():
        raise SettingsError(f"{out} is there already; choose another name, or delete it")
    check_out(out)
    target = load_target(options)
    prompts = prompts_for(target)
    asked: dict[str, Any] = {"max_tokens": options["max_tokens"], "temperature": 0.0, "seed": seed}
    layers = layers_for(target)
    facts = json.dumps({"target": Path(target.name).name, "layers": layers, **asked})
    kept_texts, checkpoint = KeptTexts(out.with_suffix(".texts"), facts), Checkpoint(out.with_suffix(".training"), {})
    with progress_bar() as progress:
        on_answer = advancing(progress, "answering prompts", len(prompts))
        asked |= {"end_ids": target.end_ids, "layers": layers, "dtype": dtype, "whole": whole}
        texts = write_texts(target.runner, prompts, kept=kept_texts, on_answer=on_answer, **asked)
        trained = train(target, texts, settings, checkpoint=checkpoint, on_step=stepping(progress))
    trained.head.save(out, trained.figures())
    checkpoint.delete()
    kept_texts.delete()
    _print(trained, examples, out)


def _print(trained: TrainedHead[_Head], examples: str, out: Path) -> None:
    shown = table("tokens ahead", numbers=("all of them among the candidates",))
    for depth, share in enumerate(trained.accepted, 1):
        shown.add_row(str(depth), f"{share:.1%}")
    Console().print(shown)
    say(
        f"{trained.tokens_per_step:.2f} tokens a target pass with {trained.num_candidates} candidates, on texts that it"
        f" did not learn from. Trained {trained.num_trained:,} {examples}; {trained.head.num_weights:,} weights."
        f" Written to {out}"
    )
