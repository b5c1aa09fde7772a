"""Token ids of prompts: text, or a conversation in the model's chat template, with images or without."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from card.errors import PromptError
from card.text.chat_template import render_chat
from card.text.tokenizer import Tokenizer
from card.text.work_meter import TemplateCostError

_ANSWER = "An answer."  # stands in where only what a chat template puts behind it counts
Messages = Sequence[Mapping[str, Any]]
# Arguments of transformers' apply_chat_template, and what it sets itself.
RESERVED_KWARGS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations"}
    | {"kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
    | {"sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"}
)


@dataclass(frozen=True, slots=True)
class Conversation(Messages):
    """Messages with the other variables of their chat template; usable wherever plain messages are."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()  # functions that the model may call, in OpenAI's shape
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the template

    def __getitem__(self, idx: Any) -> Any:
        return self.messages[idx]

    def __len__(self) -> int:
        return len(self.messages)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the token ids of a plain prompt, with the special tokens that the tokenizer adds.

    Raises: PromptError if the prompt is empty, not a string or not valid text.
    """
    check_text(prompt, "the prompt")
    if not prompt:
        raise PromptError("the prompt is empty; give at least one character")
    return _checked_ids(tokenizer.encode(prompt))


def encode_chat(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Return the token ids of a conversation in the tokenizer's chat template, up to where the answer starts.

    Args:
        messages: each with "role" and "content", the oldest first, perhaps as a `Conversation`. The content may be
            empty, and None beside "tool_calls". It may be a list of parts as `split_images` leaves them.
    Raises: PromptError if the tokenizer has no chat template, or the template or we cannot use the messages.
    """
    _check_messages(messages)
    for idx, message in enumerate(messages):
        check_text(message["role"], f"the role of message {idx}")
        content = _content(message)
        has_parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
        for part in content if has_parts else [{"text": content}]:
            check_text(part.get("text", ""), f"the content of message {idx}")
    if not tokenizer.chat_template:
        raise PromptError("the tokenizer has no chat template; give a plain prompt, or use a model made for chat")
    tools: list[Mapping[str, Any]] | None = None
    variables: dict[str, Any] = {}
    if isinstance(messages, Conversation):
        tools, variables = list(messages.tools) or None, dict(messages.template_kwargs)
    plain = [{**message, "content": _content(message)} for message in messages]
    text = render_chat(tokenizer, plain, tools=tools, add_generation_prompt=True, template_kwargs=variables)
    return encode_rendered(tokenizer, text)


def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of what `render_chat` gave: the template has written the special tokens."""
    return _checked_ids(tokenizer.encode(text, add_special_tokens=False))


def split_images(messages: Messages) -> tuple[Messages, list[object]]:
    """Return messages with lists of parts as contents, as templates for images read them, and the images' sources.

    Args:
        messages: contents are texts or lists of parts: {"type": "text", "text": ...}, {"type": "image_url",
            "image_url": {"url": ...}} or {"type": "image", "image": ...}.
    Raises: PromptError for other parts, and for a text that is not a string.
    """
    _check_messages(messages)
    sources: list[object] = []
    told: list[dict[str, Any]] = []
    for idx, message in enumerate(messages):
        content = _content(message)
        parts = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
        told.append({**message, "content": [_part(part, sources, f"message {idx}") for part in parts]})
    if isinstance(messages, Conversation):
        return Conversation(told, messages.tools, messages.template_kwargs), sources
    return told, sources


def joined_texts(messages: Messages) -> Messages:
    """Return what `split_images` gave for a template that takes texts alone; there are no images in it."""
    plain = [{**one, "content": "\n".join(str(part["text"]) for part in one["content"])} for one in messages]
    if isinstance(messages, Conversation):
        return Conversation(plain, messages.tools, messages.template_kwargs)
    return plain


def _part(part: object, sources: list[object], what: str) -> dict[str, Any]:
    """Return a part of a content for the template, and note the source of an image."""
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "image_url", "image"):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise PromptError(f"the parts of {what} must be of type text, image_url or image, got {str(kind)[:40]!r}")
    if part["type"] == "text":
        check_text(part.get("text"), f"the text of a part of {what}")
        return {"type": "text", "text": part["text"]}
    source = part.get(part["type"])
    if part["type"] == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    sources.append(source)
    return {"type": "image"}


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise PromptError(
            'the conversation is empty; give at least one message such as {"role": "user", "content": "Hi"}'
        )
    for idx, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise PromptError(f'message {idx} must have the keys "role" and "content", got {message!r}')


def turn_end_id(tokenizer: Tokenizer) -> int | None:
    """Return the special token that closes an answer in the chat template; None if there is none.

    Raises: TemplateCostError if the template takes more than any conversation of this size can need.
    """
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": _ANSWER}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_chat(tokenizer, turns)
    except TemplateCostError:
        raise
    except PromptError:
        return None
    rest = text.rpartition(_ANSWER)[2].lstrip()
    special = {str(token): idx for idx, token in tokenizer.added_tokens_decoder.items() if token.special}
    leading = [token for token in special if token and rest.startswith(token)]
    return special[max(leading, key=len)] if leading else None


def _content(message: Mapping[str, Any]) -> Any:
    """Return what a message says: nothing, if it only has calls."""
    content = message["content"]
    return "" if content is None and message.get("tool_calls") else content


def check_text(text: object, what: str) -> None:
    """Raise PromptError unless this is text that UTF-8 can hold; ``what`` names it."""
    if not isinstance(text, str):
        raise PromptError(f"{what} must be a string, got {type(text).__name__}")
    surrogate = re.search(r"[\ud800-\udfff]", text)
    if surrogate:
        raise PromptError(
            f"{what} is not valid text: lone surrogate {surrogate[0]!a} at character {surrogate.start()}; "
            "decode the input as UTF-8 with errors='replace'"
        )


def _checked_ids(ids: Iterable[Any]) -> list[int]:
    checked = [int(token_id) for token_id in ids]
    if not checked:
        raise PromptError("the tokenizer makes no token of the prompt; give more text")
    return checked
