"""Parts of all commands of `card train`: output file, prompts, models, progress bars, and the last line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from card.assembly.plan import DEFAULT_MODEL_LEN
from card.cli.parts.chosen_models import resolve_models
from card.cli.parts.files import check_can_write, read_prompts
from card.cli.parts.starting import spinner
from card.errors import PromptError, SettingsError
from card.models.demo import SAMPLE_PROBLEMS
from card.models.facts import context_limit, end_token_ids
from card.models.loaded_model import LoadedModel
from card.models.loading import check_pair, load_decoder, load_tokenizer
from card.models.runner import RowRunner
from card.models.runners import make_runner
from card.text.prompts import encode_chat, encode_prompt
from card.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """A target from whose texts a module learns."""

    name: str
    tokenizer: Tokenizer
    model: LoadedModel
    runner: RowRunner
    end_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class TrainingPair(TrainingTarget):
    """A target and a draft model."""

    draft: RowRunner
    draft_name: str  # without its folders


def advancing(progress: Progress, words: str, total: int, done: int = 0) -> Callable[[], None]:
    """Add a bar; return a function that advances it by one."""
    task = progress.add_task(words, total=total, completed=done)
    return lambda: progress.advance(task)


def stepping(progress: Progress, total: int | None = None) -> Callable[..., None]:
    """Add a bar; return a function of the completed steps, and optionally of the total, that updates it."""
    task = progress.add_task("training", total=total)
    return lambda step, num_steps=total: progress.update(task, completed=step, total=num_steps)


def say(words: str) -> None:
    """Print the result of a training without wrapping lines, as it ends with a file name."""
    Console().print(words, soft_wrap=True)


# ---- files -----------------------------------------------------------------------------------------------------------


def check_out(out: Path) -> None:
    """Refuse a file that cannot be written, or whose folder does not exist. Raises: SettingsError."""
    if not out.absolute().parent.is_dir():
        raise SettingsError(f"there is no folder {out.absolute().parent} to write {out.name} into; make it first")
    check_can_write(out)


def questions_in(prompts: Path | None, most: int | None) -> Sequence[str]:
    """Return the first prompts of a file, or of the built-in prompts. Raises: PromptError if one cannot be read."""
    return (SAMPLE_PROBLEMS if prompts is None else read_prompts(prompts))[:most]


# ---- models ----------------------------------------------------------------------------------------------------------


def load_target(options: dict[str, Any]) -> TrainingTarget:
    """Load the target that the options name. Raises: CardError of any kind."""
    name, _ = resolve_models({**options, "draft": None}, needs_draft=False)
    with spinner("loading the target"):
        tokenizer, model = load_tokenizer(name), load_decoder(name)
        target = make_runner(model, max_model_len=min(DEFAULT_MODEL_LEN, context_limit(model)))
    return TrainingTarget(name, tokenizer, model, target, end_token_ids(model, tokenizer))


def load_training_pair(options: dict[str, Any]) -> TrainingPair:
    """Load the models that the options name. Raises: CardError of any kind."""
    target_name, draft_name = resolve_models(options, needs_draft=True)
    assert draft_name is not None
    torch.set_num_threads(options.get("threads") or torch.get_num_threads())
    with spinner("loading the models"):
        tokenizer, where = load_tokenizer(target_name), {"dtype": options["dtype"], "device": options["device"]}
        check_pair(tokenizer, target_name, draft_name)
        models = [load_decoder(name, **where) for name in (target_name, draft_name)]
    max_model_len = min(DEFAULT_MODEL_LEN, *map(context_limit, models))
    target, draft = (make_runner(model, max_model_len=max_model_len) for model in models)
    folder = Path(draft_name)
    name = folder.resolve().name if folder.is_dir() else draft_name
    return TrainingPair(target_name, tokenizer, models[0], target, end_token_ids(models[0], tokenizer), draft, name)


def encode_questions(tokenizer: Tokenizer, questions: Sequence[str], most: int) -> list[list[int]]:
    """Return the token ids of each question, as a chat turn if the model has a template. Raises: PromptError."""
    encoded = []
    for question in questions:
        turn = [{"role": "user", "content": question}]
        ids = encode_chat(tokenizer, turn) if tokenizer.chat_template else encode_prompt(tokenizer, question)
        if len(ids) > most:
            raise PromptError(
                f"the prompt that begins {question[:40]!r} has {len(ids)} tokens, and the models' context leaves room"
                f" for {most}; leave it out"
            )
        encoded.append(ids)
    return encoded
