"""The command that trains a drafting head: the target answers prompts, and the head learns from the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from card.cli.parts.tables import progress_bar, table
from card.errors import SettingsError
from card.family.learning.bound_module import DraftingHead
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.driver import TrainingTarget, advancing, check_out, load_target, say, stepping
from card.family.learning.head_training import TrainedHead
from card.family.learning.target_texts import TargetTexts, write_texts
from card.models.images import ImagePrompt

_Head = TypeVar("_Head", bound=DraftingHead)


def train_on_own_texts(
    settings: Any,
    train: Callable[..., TrainedHead[_Head]],
    prompts_for: Callable[[TrainingTarget], Sequence[Sequence[int]]],
    *,
    out: Path,
    seed: int,
    examples: str,
    whole: bool = False,
    **options: Any,
) -> None:
    """Let the target answer prompts, train a head on the answers, save it and print; resume an interrupted run.

    Args:
        settings, train: of the training; as `card.family.ctc.train_ctc.train_head`.
        prompts_for: returns the prompts' token ids.
        examples: word for the head's examples.
        whole: the head learns from the prompts, too.
    Raises: CardError of any kind.
    """
    check_out(out)
    if out.exists():
        raise SettingsError(f"{out} is there already; choose another name, or delete it")
    target = load_target(options)
    prompts = prompts_for(target)
    asked = {"max_tokens": options["max_tokens"], "temperature": 0.0, "seed": seed}
    kept, checkpoint = out.with_suffix(".texts"), Checkpoint(out.with_suffix(".training"), {})
    facts = _facts(target.name, prompts, asked)
    with progress_bar() as progress:
        texts = TargetTexts.load(kept, facts)
        if texts is None:
            on_answer = advancing(progress, "answering prompts", len(prompts))
            texts = write_texts(
                target.runner, prompts, end_ids=target.end_ids, whole=whole, on_answer=on_answer, **asked
            )
            texts.save(kept, facts)
        trained = train(target.runner, texts, settings, checkpoint=checkpoint, on_step=stepping(progress))
    trained.head.save(out, trained.figures())
    checkpoint.delete()
    kept.unlink(missing_ok=True)
    _print(trained, examples, out)


def _facts(target: str, prompts: Sequence[Sequence[int]], asked: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        keys = prompt.images.keyed(prompt).tolist() if isinstance(prompt, ImagePrompt) else list(prompt)
        digest.update(json.dumps(keys).encode())
    return json.dumps({"target": Path(target).name, "prompts": digest.hexdigest()[:16], **asked})


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
