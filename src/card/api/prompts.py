"""Token ids of prompts: of text, of a conversation with or without images, or given as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, cast

from card.config import EngineSettings
from card.config.fields import plain, require
from card.errors import PromptError, SettingsError, named
from card.models.images import ImagePrompt, Tower
from card.models.loaded_model import LoadedModel
from card.models.loading import load_vision_tower
from card.models.runner import RowRunner
from card.text.pictures import PictureBounds, read_pictures, require_pillow
from card.text.prompts import (
    RESERVED_KWARGS,
    Conversation,
    Messages,
    encode_chat,
    encode_prompt,
    joined_texts,
    split_images,
)
from card.text.tokenizer import Tokenizer

TokenIds = Collection[SupportsIndex]  # a list, an array or a tensor
Prompt = str | TokenIds | Sequence[Mapping[str, Any]]


class PromptReader:
    """Reads prompts for one target."""

    def __init__(self, tokenizer: Tokenizer, settings: EngineSettings, tower: Tower | None = None) -> None:
        """Read prompts with a tokenizer; without a vision tower no images."""
        folder = None if settings.image_dir is None else Path(settings.image_dir)
        self._bounds = PictureBounds(max_images=settings.max_images, folder=folder)
        self._tokenizer, self._tower = tokenizer, tower

    @classmethod
    def for_target(
        cls,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        target: str | LoadedModel,
        runner: RowRunner,
        dtype: object,
    ) -> PromptReader:
        """Return the reader of a target, which accepts images from now on if the settings allow any.

        Args:
            dtype: of its vision tower.
        Raises: SettingsError, ModelError if the model has no vision.
        """
        if not settings.max_images:
            return cls(tokenizer, settings)
        require_pillow()
        if not isinstance(target, str):
            raise SettingsError(
                f"{named('max_images')} needs a target given by name, so that its vision tower is loaded too"
            )
        kept_in = settings.weights_dir
        tower = load_vision_tower(target, dtype=dtype, device=runner.device, cache_dir=kept_in)
        runner.see_with(tower)
        return cls(tokenizer, settings, tower)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, an `ImagePrompt` if there are images in it.

        Raises: PromptError if it is not a prompt.
        """
        if isinstance(prompt, str):
            return tuple(encode_prompt(self._tokenizer, prompt))
        if isinstance(prompt, ImagePrompt):
            return prompt
        listed: object = prompt if isinstance(prompt, Sequence) else _as_list(prompt)
        given: Sequence[object] = listed if isinstance(listed, Sequence) else (None,)
        if given and isinstance(given[0], Mapping):
            return self._encode_chat(cast(Messages, given))
        token_ids = [one for one in map(plain, given) if isinstance(one, int) and not isinstance(one, bool)]
        if len(token_ids) < len(given):
            where = "; give conversations to chat" if isinstance(prompt, Mapping) else ""
            raise PromptError(
                f"a prompt must be a string or a list of token ids, got {type(prompt).__name__}; put several of them, "
                f"or one that is token ids, into a list{where}"
            )
        return tuple(token_ids)

    def _encode_chat(self, messages: Messages) -> tuple[int, ...]:
        has_parts = any(isinstance(one, Mapping) and isinstance(one.get("content"), list | tuple) for one in messages)
        if self._tower is None and not has_parts:
            return tuple(encode_chat(self._tokenizer, messages))
        messages, sources = split_images(messages)
        pictures = read_pictures(sources, self._bounds)
        if self._tower is None:
            return tuple(encode_chat(self._tokenizer, joined_texts(messages)))
        token_ids = encode_chat(self._tokenizer, messages)
        images = [self._tower.prepare(one) for one in pictures]
        return self._tower.place(token_ids, images) if images else tuple(token_ids)


def with_variables(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any] | None
) -> Messages:
    """Return a conversation with the tools that the model may call, and other variables of its chat template.

    Raises: PromptError for tools or variables of another shape, or beside a prompt that is no conversation.
    """
    if tools is None and template_kwargs is None:
        return messages
    given, variables = tools or (), template_kwargs or {}
    is_list = isinstance(given, Sequence) and all(isinstance(one, Mapping) for one in given)
    require(
        is_list and not isinstance(given, str), "tools", "a list of functions in OpenAI's shape", tools, PromptError
    )
    is_named = isinstance(variables, Mapping) and not RESERVED_KWARGS.intersection(variables)
    allowed = f"a mapping of variables other than {', '.join(sorted(RESERVED_KWARGS))}"
    require(is_named, "chat_template_kwargs", allowed, template_kwargs, PromptError)
    (conversation,) = conversations(messages)
    return Conversation(conversation, tuple(given), dict(variables))


def _as_list(value: Any) -> object:
    """Return the numbers of an array or a tensor; other values unchanged."""
    return value.tolist() if hasattr(value, "shape") and hasattr(value, "tolist") else value


def conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return the conversations of a call: one alone, or each of a list. Raises: PromptError for anything else."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        is_one = not messages or isinstance(messages[0], Mapping)
        listed: list[Any] = [messages] if is_one else list(messages)
        if not any(isinstance(one, str | Mapping) or not isinstance(one, Sequence) for one in listed):
            return listed
    raise PromptError(
        'a conversation must be a list of messages such as {"role": "user", "content": "Hi"}, and several of them a '
        f"list of such lists, got {messages!r:.80}"
    )
