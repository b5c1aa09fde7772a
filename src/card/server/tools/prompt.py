"""Conversations with tools as chat templates take them, and in plain messages for templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from card.server.schemas import Message
from card.server.tool_schemas import FunctionDefinition, decoded_arguments
from card.server.tools.formats import ToolFormat

_INTRODUCTION = (
    "You can call functions. Each line between <tools> and </tools> describes one in JSON:\n<tools>\n{tools}\n"
    "</tools>\n"
    "To call functions, write the following and nothing behind it, with the function's name and a JSON object of its "
    "arguments:\n{example}\nThe results come back between <tool_response> and </tool_response>."
)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template that knows tools: arguments of earlier calls as objects."""
    told = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name is not None:
            one["name"] = message.name
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": decoded_arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        told.append(one)
    return told


def plain_messages(
    messages: Sequence[Message], functions: Sequence[FunctionDefinition], form: ToolFormat
) -> list[dict[str, Any]]:
    """Return messages for a chat template that knows no tools.

    The functions are described in the system message, calls are text of the assistant, results are text of the user.
    """
    told: list[dict[str, Any]] = []
    last_role = ""
    for message in messages:
        role, content = message.role, message.content
        if message.tool_calls:
            calls = [(call.function.name, call.function.arguments.strip() or "{}") for call in message.tool_calls]
            content = "\n".join(filter(None, (content, form.write(calls))))
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if last_role == "tool":  # several results are one turn of the user
                told[-1]["content"] += "\n" + content
                continue
        last_role = role
        one = {"role": "user" if role == "tool" else role, "content": content}
        told.append(one if message.name is None or role == "tool" else {**one, "name": message.name})
    if not functions:
        return told
    tools = "\n".join(json.dumps(one.as_template_has_it(), ensure_ascii=False) for one in functions)
    introduction = _INTRODUCTION.format(tools=tools, example=form.write([("NAME", "ARGUMENTS")]))
    if told[0]["role"] in ("system", "developer"):
        first = {**told[0], "content": "\n\n".join(filter(None, (told[0]["content"], introduction)))}
        return [first, *told[1:]]
    return [{"role": "system", "content": introduction}, *told]
