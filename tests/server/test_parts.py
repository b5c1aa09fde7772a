"""Answers with parts over HTTP: thoughts, channels, calls and grammars behind them, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from card.server.schemas import ChatRequest
from card.server.tools.support import template_variables
from card.text.parts.formats import FORMATS
from tests.server.running import Running, streams
from tests.server.scripted import scripted_bytes, served

pytestmark = pytest.mark.timeout(240)

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def _rm(value: dict[str, Any]) -> dict[str, Any]:
    """Return a function whose only parameter has a schema."""
    schema = {"type": "object", "properties": {"p": value}, "required": ["p"]}
    return {"type": "function", "function": {"name": "rm", "parameters": schema}}


RM = _rm({"type": "string"})
THINKING: dict[str, list[str]] = {
    "plain": ["<thi", "nk>I ", "see.\n", "Really", "\n</th", "ink>\n", "\nNo", ".\n", "Yes"],
    "tempted": ["<think>So<tool", '_call>{"name":"rm","arguments":{"p":"/"}}</tool_call>', " but no.</think>", "No."],
    "json": ["<think>Short", ".\n</think>", "\n\n", '{"a', '": 7', "}"],
    "calls": [
        "<think>Go",
        "</think>\n<tool",
        '_call>\n{"name": "rm"',
        ', "arguments": {"p": "',
        "a/b",
        '"}',
        "}\n</tool_call>",
    ],
    "endless": ["<think>a", " b", " c", " d", " e", " f"],
}
THINKING_TEMPLATE = "{% for t in tools or [] %}<tool_call>{% endfor %}{# </think> #}{{ messages[-1].content }}"
CHANNELS: dict[str, list[str]] = {
    "plain": [
        "<|channel|>an",
        "alysis<|message|>The user",
        " says hi.",
        "<|end|><|st",
        "art|>assistant<|channel|>",
        "final<|message|>Hel",
        "lo!",
    ],
    "calls": [
        "<|channel|>analysis<|message|>Hm",
        "<|end|><|start|>assistant",
        "<|channel|>commentary to=functions.rm ",
        "<|constrain|>json<|mess",
        'age|>{"p"',
        ': "x"}',
    ],
}
CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>")  # tokens of gpt-oss
FINAL = {"json": ["<|channel|>", "final", "<|message|>", '{"a', '": 7', "}"]}
CALL = {
    "calls": [
        "<|channel|>",
        "commentary",
        " to=functions.rm ",
        "json",
        "<|message|>",
        '{"p"',
        ': "',
        "x",
        '"}',
        "<|call|>",
    ]
}
CHANNEL_TEMPLATE = "{% if tools %}<|start|><|channel|><|message|>{% endif %}{{ messages[-1].content }}"


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    """Serve a model that thinks between tags, as Qwen 3 does."""
    yield from served(scripted_bytes(THINKING, THINKING_TEMPLATE))


@pytest.fixture(scope="module")
def channels() -> Iterator[Running]:
    """Serve a model that writes channels, as gpt-oss does."""
    yield from served(scripted_bytes(CHANNELS, CHANNEL_TEMPLATE))


def spoken(server: Running, script: str, **fields: Any) -> dict[str, Any]:
    """Return an answer, which must be the same streamed and not."""
    asked = {"messages": [{"role": "user", "content": script}], "temperature": 0, "max_tokens": 40, **fields}
    response = server.post(CHAT, asked)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    (choice,) = answer["choices"]
    (read,) = streams(server.url, CHAT, [asked])
    deltas = [one["delta"] for event in read.events for one in event["choices"]]
    message = choice["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message.get(name, "")
    called = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    told = "".join(call["arguments"] for call in called)
    assert told == "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    assert read.finish_reason == choice["finish_reason"]
    return answer


def parts(answer: dict[str, Any]) -> tuple[str, str | None, list[tuple[str, str]]]:
    message = answer["choices"][0]["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"], calls


def test_thoughts_are_apart_from_the_content_and_counted(thinker: Running) -> None:
    answer = spoken(thinker, "plain", logprobs=True)
    assert parts(answer) == ("I see.\nReally", "No.\nYes", [])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    told = answer["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in told][:3] == ["\nNo", ".\n", "Yes"], "log-probabilities are those of the content"


def test_a_call_within_thoughts_is_no_call(thinker: Running) -> None:
    answer = spoken(thinker, "tempted", tools=[RM])
    thoughts = 'So<tool_call>{"name":"rm","arguments":{"p":"/"}}</tool_call> but no.'
    assert parts(answer) == (thoughts, "No.", [])
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_stop_strings_mean_the_content(thinker: Running) -> None:
    assert parts(spoken(thinker, "plain", stop=["\n"])) == ("I see.\nReally", "No.", [])
    assert parts(spoken(thinker, "plain", stop=["Really", "see"])) == ("I see.\nReally", "No.\nYes", [])


def test_thoughts_that_never_close_are_what_was_written(thinker: Running) -> None:
    answer = spoken(thinker, "endless", max_tokens=4)
    assert parts(answer) == ("a b c d", "", [])
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_schema_holds_the_content_and_lets_the_model_think(thinker: Running) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    assert parts(spoken(thinker, "json", response_format=form)) == ("Short.", '{"a": 7}', [])


def test_a_schema_holds_the_final_channel() -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    for server in served(scripted_bytes(FINAL, CHANNEL_TEMPLATE, CHANNEL_MARKS)):
        assert parts(spoken(server, "json", response_format=form)) == ("", '{"a": 7}', [])
    only = {**SCHEMA, "properties": {"a": {"const": 7}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": only, "strict": True}}
    script = ["<|channel|>", "analysis", "<|message|>", "Hm?", "<|end|>", "<|start|>", "assistant"]
    for server in served(scripted_bytes({"json": script}, CHANNEL_TEMPLATE, CHANNEL_MARKS)):
        thoughts, content, calls = parts(spoken(server, "json", response_format=form, thinking_budget=5))
        assert (thoughts, json.loads(content or ""), calls) == ("Hm?", {"a": 7}, [])


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "rm"}}])
def test_a_call_of_a_channel_may_be_forced_and_is_no_thought(choice: Any) -> None:
    pytest.importorskip("llguidance")
    for server in served(scripted_bytes(CALL, CHANNEL_TEMPLATE, CHANNEL_MARKS)):
        answer = spoken(server, "calls", tools=[_rm({"enum": ["x"]})], tool_choice=choice)
        ((name, arguments),) = parts(answer)[2]
        assert (name, json.loads(arguments)) == ("rm", {"p": "x"})
        usage = answer["usage"]
        written = usage["completion_tokens"] - usage["completion_tokens_details"]["reasoning_tokens"]
        assert written >= 4, "arguments are no thoughts; what stands around them is not shown, and counts as such"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "rm"}}])
def test_forced_calls_come_behind_thoughts(thinker: Running, choice: Any) -> None:
    pytest.importorskip("llguidance")
    answer = spoken(thinker, "calls", tools=[_rm({"enum": ["x"]})], tool_choice=choice, parallel_tool_calls=False)
    thoughts, content, ((name, arguments),) = parts(answer)
    assert (thoughts, content, name, json.loads(arguments)) == ("Go", None, "rm", {"p": "x"})
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("served", ["thinker", "channels"])
def test_calls_come_behind_thoughts(served: str, request: pytest.FixtureRequest) -> None:
    answer = spoken(request.getfixturevalue(served), "calls", tools=[RM])
    expected = ("Go", '{"p": "a/b"}') if served == "thinker" else ("Hm", '{"p": "x"}')
    assert parts(answer) == (expected[0], None, [("rm", expected[1])])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_is_streamed_name_first_and_its_arguments_as_they_come(thinker: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "calls"}], "tools": [RM], "temperature": 0, "max_tokens": 40}
    (read,) = streams(thinker.url, CHAT, [asked])
    deltas = [one["delta"] for event in read.events for one in event["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0] == {"name": "rm", "arguments": ""}
    assert "".join(call["arguments"] for call in calls) == '{"p": "a/b"}'


def test_channels_are_parts(channels: Running) -> None:
    assert parts(spoken(channels, "plain")) == ("The user says hi.", "Hello!", [])


@pytest.mark.parametrize("served", ["thinker", "channels"])
def test_responses_have_reasoning_items_which_may_be_sent_back(served: str, request: pytest.FixtureRequest) -> None:
    server: Running = request.getfixturevalue(served)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model="scripted", input="plain", temperature=0, max_output_tokens=40)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text in ("I see.\nReally", "The user says hi.")  # type: ignore[union-attr]
        assert answer.output_text in ("No.\nYes", "Hello!")
        assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
        sent_back: Any = [
            {"role": "user", "content": "x"},
            *(item.model_dump(exclude_none=True) for item in answer.output),
        ]
        again = client.responses.create(
            model="scripted",
            input=[*sent_back, {"role": "user", "content": "plain"}],
            max_output_tokens=40,
            temperature=0,
        )
        assert again.output_text == answer.output_text
        with client.responses.stream(model="scripted", input="plain", temperature=0, max_output_tokens=40) as stream:
            kinds = [event.type for event in stream]
        assert "response.reasoning_text.delta" in kinds and "response.output_text.delta" in kinds


def test_a_budget_closes_the_thoughts_with_their_token() -> None:
    pytest.importorskip("llguidance")
    scripts = {"think": ["<think>", "a", " b", " c", " d", " e", " f", " g", "</think>", "Done", "."]}
    for server in served(scripted_bytes(scripts, THINKING_TEMPLATE, ("<think>", "</think>"))):
        assert parts(spoken(server, "think")) == ("a b c d e f g", "Done.", [])
        for budget, thoughts in ((0, ""), (3, "a b c")):
            answer = spoken(server, "think", thinking_budget=budget)
            assert parts(answer) == (thoughts, "Done.", [])
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 2


def test_a_budget_needs_a_token_that_ends_the_thoughts(thinker: Running) -> None:
    asked = {"messages": [{"role": "user", "content": "plain"}], "thinking_budget": 3}
    response = thinker.post(CHAT, asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_budget"


def test_how_much_to_think_reaches_the_template() -> None:
    asked: Any = {"messages": [{"role": "user", "content": "x"}]}
    for fields, variables in (
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"thinking_budget": 7}, {"thinking_budget": 7}),
    ):
        assert template_variables(ChatRequest.model_validate({**asked, **fields}), FORMATS["hermes"]) == variables
    silent = ChatRequest.model_validate({**asked, "reasoning_effort": "none"})
    assert template_variables(silent, FORMATS["hunyuan3"])["reasoning_effort"] == "no_think", "the template's word"
