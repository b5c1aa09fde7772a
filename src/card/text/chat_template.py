"""Render a conversation with a model's chat template, as transformers does, but within bounds on time and memory.

Source: `apply_chat_template` and `render_jinja_template` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from card.errors import PromptError
from card.text.metered_templates import render
from card.text.shapes import shapes
from card.text.tokenizer import Tokenizer

# Errors of a template that gets odd values, or that cannot be compiled.
_TEMPLATE_ERRORS: tuple[type[Exception], ...] = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
_MOST_REASON_CHARS = 300
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of what a model thought, the usual one first


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation in the tokenizer's chat template, in the first of its `shapes` that the template takes.

    Args:
        messages: as they are given to the template, but for keys without a value.
        tools: functions that the model may call; they may choose a template of their own.
        template_kwargs: further variables of the template.
    Raises: PromptError if there is no template or it refuses the messages; TemplateCostError, which is one, if it takes
        more steps or text than a conversation of this size can need.
    """
    try:
        template = tokenizer.get_chat_template(tools=None if tools is None else [dict(tool) for tool in tools])
        chat = [_plain({key: value for key, value in one.items() if value is not None}) for one in messages]
        variables = {
            "documents": None,
            **_plain({**tokenizer.special_tokens_map, **(template_kwargs or {})}),
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return _render_a_shape(template, chat, variables)
    except PromptError:
        raise
    except _TEMPLATE_ERRORS as error:
        reason = " ".join(str(error)[:_MOST_REASON_CHARS].split()) or type(error).__name__
        raise PromptError(f"the model's chat template refuses the messages: {reason}") from error


def _render_a_shape(template: str, chat: list[Any], variables: Mapping[str, Any]) -> str:
    """Return the text of the first shape that a template takes. Raises: its error for the first shape."""
    refusal: Exception | None = None
    for shape in shapes(chat):
        try:
            return render(template, {**variables, "messages": _with_older_names(shape)})
        except PromptError:
            raise  # it takes too much, in any shape
        except _TEMPLATE_ERRORS as error:
            refusal = refusal or error
    assert refusal is not None, "there is a first shape"
    raise refusal


def _with_older_names(chat: list[Any]) -> list[Any]:
    """Return messages with their reasoning under all names that templates read, as transformers does."""
    renamed: list[Any] = []
    for message in chat:
        thoughts = [message[name] for name in _REASONING if message.get(name) is not None]
        renamed.append({"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]} if thoughts else message)
    return renamed


def _plain(value: Any) -> Any:
    """Return a value of JSON's types; anything else becomes a text with its type, as with transformers."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else list(map(_plain, value))
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"
