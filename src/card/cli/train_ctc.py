"""`card train ctc`: a head that drafts from the target's hidden states."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from card.cli.files import read_prompts
from card.cli.options import resolve_models
from card.cli.starting import spinner
from card.cli.tables import progress_bar, table
from card.cli.train import check_folder, encode_questions
from card.ctc.texts import TargetTexts, write_texts
from card.ctc.training import Trained, TrainSettings, train_head
from card.errors import SettingsError
from card.models.checkpoint import Checkpoint
from card.models.facts import context_limit, end_token_ids
from card.models.loading import load_decoder, load_tokenizer
from card.models.runners import make_runner

_MOST_CONTEXT = 4096


def run(*, data: Path, max_prompts: int | None, out: Path, loss: str, epochs: int, seed: int, **options: Any) -> None:
    """Do what `card train ctc` was asked for. Raises: CardError of any kind."""
    check_folder(out)
    if out.exists():
        raise SettingsError(f"{out} is there already; choose another name, or delete it")
    settings = TrainSettings(loss=loss, epochs=epochs, seed=seed)  # type: ignore[arg-type]
    target_name, _ = resolve_models({**options, "draft": None}, needs_draft=False)
    with spinner("loading the target"):
        tokenizer, model = load_tokenizer(target_name), load_decoder(target_name)
        target = make_runner(model, max_model_len=min(_MOST_CONTEXT, context_limit(model)))
    prompts = encode_questions(tokenizer, read_prompts(data)[:max_prompts], target.max_model_len - 1)
    asked = {"max_tokens": options["max_tokens"], "temperature": 0.0, "seed": seed}
    kept, checkpoint = out.with_suffix(".texts"), Checkpoint(out.with_suffix(".training"), {})
    facts, end_ids = _facts(target_name, prompts, asked), end_token_ids(model, tokenizer)
    texts = TargetTexts.load(kept, facts)
    with progress_bar() as progress:
        if texts is None:
            task = progress.add_task("answering prompts", total=len(prompts))
            texts = write_texts(target, prompts, end_ids=end_ids, on_answer=lambda: progress.advance(task), **asked)
            texts.save(kept, facts)
        steps = progress.add_task("training")
        trained = train_head(
            target,
            texts,
            settings,
            checkpoint=checkpoint,
            on_step=lambda step, num_steps: progress.update(steps, completed=step, total=num_steps),
        )
    trained.head.save(out, trained.figures())
    checkpoint.delete()
    kept.unlink(missing_ok=True)
    _print(Console(), trained, out)


def _facts(target: str, prompts: Sequence[Sequence[int]], asked: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    return json.dumps({"target": Path(target).name, "prompts": digest, **asked})


def _print(console: Console, trained: Trained, out: Path) -> None:
    shown = table("tokens ahead", numbers=("all of them among the candidates",))
    for depth, share in enumerate(trained.accepted, 1):
        shown.add_row(str(depth), f"{share:.1%}")
    console.print(shown)
    console.print(
        f"{trained.tokens_per_step:.2f} tokens a target pass with {trained.num_candidates} candidates, on texts that it"
        f" did not learn from. Trained {trained.num_rows:,} rows; {trained.head.num_weights:,} weights. Written to"
        f" {out}",
        soft_wrap=True,
    )
