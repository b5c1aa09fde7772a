"""Custom tools of chat completions, whose input is one text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from card.server.bodies import fitted
from card.server.schemas import ChatRequest
from card.server.strict import Ignored
from card.server.tools.support import template_messages
from tests.server.running import Running
from tests.server.scripted import scripted, served

CHAT = "/v1/chat/completions"
PATCH = 'first "line"\n\tsecond \\ caf\u00e9'
APPLY: Any = {"type": "custom", "custom": {"name": "apply", "description": "Edits."}}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCRIPTS = {
    "one": ["<tool_call>", '\n{"name": "apply", "arguments": {"inp', 'ut": "a\\', 'nb"', "}}\n</tool_call>"],
    "both": [
        "So.",
        '<tool_call>{"name": "apply", "arguments": {"input": "x"}}</tool_call>\n',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n',
        '<tool_call>{"name": "apply", "arguments": {"text": "y"}}</tool_call>',
    ],
    "cut": ["<tool_call>", '{"name": "apply", "arguments": {"input": "a', "b", "c", "d", "e"],
}


def applied(text: str) -> dict[str, Any]:
    """Return a call of the custom tool, without its id."""
    return {"type": "custom", "custom": {"name": "apply", "input": text}}


WRITTEN: dict[str, tuple[list[dict[str, Any]], str]] = {  # calls of each script, and how it ends
    "one": ([applied("a\nb")], "tool_calls"),
    "both": (
        [
            applied("x"),
            {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            applied('{"text": "y"}'),  # arguments of another form are the input as they are
        ],
        "tool_calls",
    ),
    "cut": ([applied("abc")], "length"),
}


@pytest.fixture(scope="module")
def speaker() -> Iterator[Running]:
    """Serve a model that writes what a script says."""
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}<tool_call> {{ messages[-1].content }}"
    )
    yield from served(scripted(SCRIPTS, template))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_call_of_a_custom_tool_has_its_text_streamed_or_not(speaker: Running, script: str) -> None:
    asked: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": script}], "temperature": 0}
    asked |= {"tools": [APPLY, ADD], "max_tokens": 4 if script == "cut" else 40}
    wanted, reason = WRITTEN[script]
    with openai.OpenAI(base_url=f"{speaker.url}/v1", api_key="none") as client:
        (choice,) = client.chat.completions.create(**asked).choices
        chunks = list(client.chat.completions.create(stream=True, **asked))
    whole = [call.to_dict() for call in choice.message.tool_calls or []]
    assert [{name: one for name, one in call.items() if name != "id"} for call in whole] == wanted
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == reason
    deltas = [call.to_dict() for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    for idx, call in enumerate(wanted):
        kind = call["type"]
        begun, *pieces = [delta for delta in deltas if delta["index"] == idx]
        assert begun["id"] and begun["type"] == kind and begun[kind]["name"] == call[kind]["name"]
        text = "input" if kind == "custom" else "arguments"
        assert begun[kind][text] == "" and "".join(piece[kind][text] for piece in pieces) == call[kind][text]
        assert all(set(piece) == {"index", kind} for piece in pieces)
    if script == "one":
        assert [delta["custom"]["input"] for delta in deltas] == ["", "a", "\nb"]


def test_custom_tools_and_their_calls_are_functions_of_the_conversation() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    call = {"id": "c1", **applied(PATCH)}
    body = {
        "messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Done"},
        ],
        "tools": [{"type": "custom", "custom": {**APPLY["custom"], "format": grammar}}],
        "tool_choice": {"type": "custom", "custom": {"name": "apply"}},
    }
    ignored = Ignored()
    fields = fitted(body, ChatRequest, ignored)
    assert ignored.names == ["tools.format"], "the model is told the grammar, and not held to it"
    (told,) = template_messages(fields.messages)[1]["tool_calls"]
    assert told == {"id": "c1", "type": "function", "function": {"name": "apply", "arguments": {"input": PATCH}}}
    parameters = fields.tools[0].function.parameters or {}
    assert 'start: "x"' in parameters["properties"]["input"]["description"]


def test_a_custom_tool_that_must_be_called_is_called(server: Running) -> None:
    choice = {"type": "custom", "custom": {"name": "apply"}}
    asked = {"messages": [{"role": "user", "content": "Go"}], "tools": [APPLY, ADD], "tool_choice": choice}
    (answer,) = server.post(CHAT, {**asked, "max_tokens": 30, "temperature": 0}).json()["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"]["name"] == "apply"
    again = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": json.dumps("Done")}
    following = server.post(CHAT, {**asked, "messages": [*asked["messages"], again, result], "max_tokens": 4})
    assert following.status_code == 200, following.text


LARK = {"syntax": "lark", "definition": 'start: "x"'}
HELD_TOOLS = {
    CHAT: {"type": "custom", "custom": {"name": "apply", "format": {"type": "grammar", "grammar": LARK}}},
    "/v1/responses": {"type": "custom", "name": "apply", "format": {"type": "grammar", **LARK}},
}


@pytest.mark.parametrize("door", HELD_TOOLS)
def test_a_server_that_ignores_nothing_refuses_a_grammar_that_it_does_not_hold(
    strict_server: Running, door: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "Go"}]} if door == CHAT else {"input": "Go"}
    answer = strict_server.post(door, {**asked, "tools": [HELD_TOOLS[door]]})
    assert answer.status_code == 400
    assert "does not hold a custom tool to its grammar; leave format out" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["web_search", 3])
def test_an_unknown_kind_of_tool_is_refused_by_the_kinds_that_there_are(server: Running, kind: object) -> None:
    tool = {"type": kind, "function": {"name": "f", "arguments": "{}"}}
    called = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{**tool, "id": "1"}]}]
    for field, body in (("tools.0", {"tools": [tool]}), ("messages.1.tool_calls.0", {"messages": called})):
        answer = server.post("/v1/chat/completions", {"messages": called[:1], **body})
        told = f"{field}.type: must be function or custom, got {kind!r}"
        assert answer.status_code == 400 and answer.json()["error"]["message"] == told, answer.text
