"""`card train hivis`: a drafter that reads text and the hidden states of a target that sees images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from card.api.prompts import PromptReader
from card.cli.parts.files import parse_json_line
from card.config import EngineSettings
from card.errors import PromptError
from card.family.hivis.train_hivis import HivisTrainSettings, train_fused
from card.family.learning.driver import TrainingTarget
from card.family.learning.heads_command import train_on_own_texts
from card.family.learning.target_texts import TargetTexts
from card.text.lines import numbered_lines

_Messages = list[dict[str, Any]]


def run(
    *,
    data: Path,
    max_prompts: int | None,
    out: Path,
    width: int,
    layers: int,
    epochs: int,
    seed: int,
    **options: Any,
) -> None:
    """Run `card train hivis`. Raises: CardError of any kind."""
    settings = HivisTrainSettings(width=width, num_layers=layers, epochs=epochs, seed=seed)
    conversations = read_conversations(data)[:max_prompts]

    def prompts_for(target: TrainingTarget) -> list[Sequence[int]]:
        return _encoded(target, conversations, data)

    def train(target: TrainingTarget, texts: TargetTexts, settings: HivisTrainSettings, **run: Any) -> Any:
        return train_fused(target.runner, texts, settings, **run)

    train_on_own_texts(settings, train, prompts_for, out=out, seed=seed, examples="texts", whole=True, **options)


def read_conversations(path: Path) -> list[tuple[int, _Messages]]:
    """Return the conversations of a file with their line numbers. Raises: PromptError for none, or an invalid one."""
    wanted = '"messages", as of chat completions'
    lines = numbered_lines(path, "conversations")
    return [(number, parse_json_line(path, number, line, _messages, wanted)) for number, line in lines]


def _messages(row: Any) -> _Messages | None:
    messages = row["messages"]
    return list(messages) if messages and all(isinstance(one, Mapping) for one in messages) else None


def _encoded(target: TrainingTarget, conversations: Sequence[tuple[int, _Messages]], path: Path) -> list[Sequence[int]]:
    most = max((_num_images(messages) for _, messages in conversations), default=0)
    settings = EngineSettings(max_images=most, image_dir=str(path.absolute().parent))
    runner = target.runner
    reader = PromptReader.for_target(target.tokenizer, settings, target.name, runner, runner.dtype)
    prompts: list[Sequence[int]] = []
    for number, messages in conversations:
        try:
            prompt = reader.encode(messages)
        except PromptError as error:
            raise PromptError(f"{path}, line {number}: {error}") from error
        if len(prompt) >= runner.max_model_len:
            raise PromptError(
                f"{path}, line {number}: the prompt has {len(prompt)} tokens, and the target's context leaves room for"
                f" {runner.max_model_len - 1}; leave it out"
            )
        prompts.append(prompt)
    return prompts


def _num_images(messages: _Messages) -> int:
    contents = [one.get("content") for one in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return sum(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)
