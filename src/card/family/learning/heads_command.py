"""Train drafting heads on the target's own answers: shared by `card train ctc` and `card train hivis`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from card.cli.options import resolve_models
from card.cli.starting import spinner
from card.cli.tables import progress_bar, table
from card.errors import SettingsError
from card.family.learning.checkpoint import Checkpoint
from card.family.learning.head_training import TrainedHead
from card.family.learning.target_texts import TargetTexts, write_texts
from card.family.specbranch.command import check_folder
from card.models.facts import context_limit, end_token_ids
from card.models.head_files import DraftingHead
from card.models.images import ImagePrompt
from card.models.loading import load_decoder, load_tokenizer
from card.models.runners import make_runner
from card.models.torch_runner import TorchRunner

_MOST_CONTEXT = 4096


_Head = TypeVar("_Head", bound=DraftingHead)


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The target that a head is trained for."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    runner: TorchRunner


def train_on_own_texts(
    settings: Any,
    train: Callable[..., TrainedHead[_Head]],
    prompts_for: Callable[[HeadTarget], Sequence[Sequence[int]]],
    *,
    out: Path,
    seed: int,
    whole: bool = False,
    **options: Any,
) -> TrainedHead[_Head]:
    """Let the target answer prompts, train a head on the answers and save it; what was cut off goes on.

    Args:
        settings, train: of the training; as `card.family.ctc.training.train_head`.
        prompts_for: returns the prompts' token ids.
        whole: the head learns from the prompts too.
    Raises: CardError of any kind.
    """
    check_folder(out)
    if out.exists():
        raise SettingsError(f"{out} is there already; choose another name, or delete it")
    name, _ = resolve_models({**options, "draft": None}, needs_draft=False)
    with spinner("loading the target"):
        tokenizer, model = load_tokenizer(name), load_decoder(name)
        target = HeadTarget(name, tokenizer, make_runner(model, max_model_len=min(_MOST_CONTEXT, context_limit(model))))
    prompts = prompts_for(target)
    asked = {"max_tokens": options["max_tokens"], "temperature": 0.0, "seed": seed}
    kept, checkpoint = out.with_suffix(".texts"), Checkpoint(out.with_suffix(".training"), {})
    facts, end_ids = _facts(name, prompts, asked), end_token_ids(model, tokenizer)
    texts = TargetTexts.load(kept, facts)
    with progress_bar() as progress:
        if texts is None:
            task = progress.add_task("answering prompts", total=len(prompts))
            texts = write_texts(
                target.runner, prompts, end_ids=end_ids, whole=whole, on_answer=lambda: progress.advance(task), **asked
            )
            texts.save(kept, facts)
        steps = progress.add_task("training")
        trained = train(
            target.runner,
            texts,
            settings,
            checkpoint=checkpoint,
            on_step=lambda step, num_steps: progress.update(steps, completed=step, total=num_steps),
        )
    trained.head.save(out, trained.figures())
    checkpoint.delete()
    kept.unlink(missing_ok=True)
    return trained


def _facts(target: str, prompts: Sequence[Sequence[int]], asked: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        keys = prompt.images.keyed(prompt).tolist() if isinstance(prompt, ImagePrompt) else list(prompt)
        digest.update(json.dumps(keys).encode())
    return json.dumps({"target": Path(target).name, "prompts": digest.hexdigest()[:16], **asked})


def print_head(trained: TrainedHead[_Head], said: str, out: Path) -> None:
    """Print the figures of a head; ``said`` tells how much it was trained."""
    console = Console()
    shown = table("tokens ahead", numbers=("all of them among the candidates",))
    for depth, share in enumerate(trained.accepted, 1):
        shown.add_row(str(depth), f"{share:.1%}")
    console.print(shown)
    console.print(
        f"{trained.tokens_per_step:.2f} tokens a target pass with {trained.num_candidates} candidates, on texts that it"
        f" did not learn from. {said}; {trained.head.num_weights:,} weights. Written to {out}",
        soft_wrap=True,
    )
