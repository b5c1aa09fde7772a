"""Equivalent shapes of a conversation, for chat templates that refuse the given one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Chat = list[dict[str, Any]]

_SYSTEM_ROLES = ("system", "developer")
_JOINED_ROLES = (*_SYSTEM_ROLES, "user", "assistant")


def shapes(messages: Sequence[Mapping[str, Any]]) -> Iterator[Chat]:
    """Yield a conversation as it is, then other shapes of it, the nearest ones first and each once.

    Neighbours of one role become one turn, since many templates want turns to alternate. An empty answer goes between
    a result and a user's message that came before the result was answered. System messages become turns of the user,
    first those not at the beginning. Arguments of calls become texts, then those that are texts are left out.
    """
    found: list[Chat] = []
    folds: tuple[Callable[[Chat], Chat], ...] = (
        list,
        _joined,
        _with_answered_results,
        _with_systems_first,
        _without_systems,
    )
    for of_arguments in (list, _with_texts_as_arguments, _without_texts_as_arguments):
        for fold in folds:
            shape = fold(of_arguments([dict(one) for one in messages]))
            if shape not in found:
                found.append(shape)
                yield shape


def _with_answered_results(chat: Chat) -> Chat:
    answered: Chat = []
    for one in _joined(chat):
        if answered and answered[-1].get("role") == "tool" and one.get("role") == "user":
            answered.append({"role": "assistant", "content": ""})
        answered.append(one)
    return answered


def _with_systems_first(chat: Chat) -> Chat:
    """Return messages with system messages only at the beginning; later ones are turns of the user."""
    num_first = next((idx for idx, one in enumerate(chat) if one.get("role") not in _SYSTEM_ROLES), len(chat))
    return _joined(chat[:num_first] + _as_user(chat[num_first:]))


def _without_systems(chat: Chat) -> Chat:
    return _joined(_as_user(chat))


def _as_user(chat: Chat) -> Chat:
    return [{**one, "role": "user"} if one.get("role") in _SYSTEM_ROLES else one for one in chat]


def _joined(chat: Chat) -> Chat:
    """Return messages in which neighbours of one role are one turn; calls and their results stay apart."""
    joined: Chat = []
    for one in chat:
        if joined and _are_one_turn(joined[-1], one):
            joined[-1] = {**joined[-1], "content": _both(joined[-1].get("content"), one.get("content"))}
        else:
            joined.append(one)
    return joined


def _are_one_turn(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    is_plain = not (one.get("tool_calls") or other.get("tool_calls"))
    return is_plain and one.get("role") == other.get("role") and one.get("role") in _JOINED_ROLES


def _both(one: Any, other: Any) -> Any:
    """Return two contents as one: texts, or lists of parts."""
    if isinstance(one, list) or isinstance(other, list):
        return [*_parts(one), *_parts(other)]
    return "\n\n".join(filter(None, (one, other)))


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _with_texts_as_arguments(chat: Chat) -> Chat:
    return _with_arguments(chat, lambda given: given if isinstance(given, str) else json.dumps(given))


def _without_texts_as_arguments(chat: Chat) -> Chat:
    return _with_arguments(chat, lambda given: {} if isinstance(given, str) else given)


def _with_arguments(chat: Chat, changed: Callable[[Any], Any]) -> Chat:
    def renewed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": changed(function["arguments"])}}

    return [{**one, "tool_calls": [*map(renewed, one["tool_calls"])]} if one.get("tool_calls") else one for one in chat]
