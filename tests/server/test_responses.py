"""The Responses API as OpenAI's client reads it: typed objects, typed events, functions and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
)

from card.api.async_llm import AsyncLLM
from card.server.bodies import fitted
from card.server.custom_tools import InputText, as_arguments
from card.server.response_schemas import ResponsesRequest
from card.server.strict import Ignored
from card.text.parts.formats import HERMES
from tests.server.running import PROMPT, Running, Solo, run, serving
from tests.server.scripted import scripted
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

PATH = "/v1/responses"
GREEDY: Any = {"model": "demo-target", "temperature": 0.0}
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
WITH_TEMPLATE = f"<|user|>{PROMPT}<|end|><|assistant|>"
# What a client may rely on, in the order in which it comes.
MESSAGE_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
MESSAGE_EVENTS += ["content_part.done", "output_item.done"]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def kinds(events: list[Any]) -> list[str]:
    """Return the types of events, the beginning left out, one of each run of deltas."""
    told: list[str] = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if not (told and told[-1] == kind and kind.endswith(".delta")):
            told.append(kind)
    return told


def read(client: openai.OpenAI, **fields: Any) -> tuple[list[Any], Response]:
    """Return the events of a stream, which are numbered and agree with each other, and the response at its end."""
    events = list(client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds(events[:2]) == ["created", "in_progress"]
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    final = events[-1].response
    assert events[0].response.id == final.id
    for output_idx, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == output_idx]
        (done,) = [event.item for event in own if event.type == "response.output_item.done"]
        assert done == item
        assert all(event.item_id == item.id for event in own if hasattr(event, "item_id"))
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        ends = [event for event in own if event.type.endswith(("arguments.done", "text.done"))]
        assert len(ends) == 1
        if isinstance(item, ResponseFunctionToolCall):
            assert text == item.arguments == ends[0].arguments
        else:
            assert isinstance(item, ResponseOutputMessage)
            assert text == item.content[0].text == ends[0].text  # type: ignore[union-attr]
    return events, final


def test_a_text_is_answered_as_in_chat(client: openai.OpenAI, solo: Solo) -> None:
    answer = client.responses.create(input=PROMPT, max_output_tokens=300, **GREEDY)
    assert answer.output_text == solo(WITH_TEMPLATE, 300)
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    short = client.responses.create(input=PROMPT, max_output_tokens=8, **GREEDY)
    assert short.output_text == solo(WITH_TEMPLATE, 8)
    assert short.status == "incomplete" and short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"
    assert short.usage is not None and short.usage.output_tokens == 8


def test_instructions_and_items_are_the_conversation(client: openai.OpenAI, solo: Solo) -> None:
    first = client.responses.create(input=PROMPT, max_output_tokens=8, **GREEDY)
    said: Any = [
        {"role": "user", "content": PROMPT},
        *first.output,
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]
    answer = client.responses.create(input=said, instructions="Be brief.", max_output_tokens=8, **GREEDY)
    told = f"<|system|>Be brief.<|end|>{WITH_TEMPLATE}{first.output_text}<|end|><|user|>Go on.<|end|><|assistant|>"
    assert answer.output_text == solo(told, 8)
    assert answer.instructions == "Be brief."


def test_a_streamed_text_comes_as_typed_events(client: openai.OpenAI, solo: Solo) -> None:
    events, final = read(client, input=PROMPT, max_output_tokens=300, **GREEDY)
    assert kinds(events[2:]) == [*MESSAGE_EVENTS, "completed"]
    assert final.output_text == solo(WITH_TEMPLATE, 300)
    events, final = read(client, input=PROMPT, max_output_tokens=8, **GREEDY)
    assert kinds(events[2:]) == [*MESSAGE_EVENTS, "incomplete"]
    assert final.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert final.usage is not None and final.usage.output_tokens == 8


def test_a_loop_calls_a_function_and_answers_with_its_result(client: openai.OpenAI, solo: Solo) -> None:
    first = client.responses.create(
        input=PROMPT, tools=[ADD], tool_choice={"type": "function", "name": "add"}, **GREEDY
    )
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.status, first.status) == ("add", "completed", "completed")
    assert set(json.loads(call.arguments)) == {"a"}
    said: Any = [
        {"role": "user", "content": PROMPT},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    second = client.responses.create(input=said, max_output_tokens=8, **GREEDY)
    told = f"{WITH_TEMPLATE}{HERMES.write([('add', call.arguments)])}<|end|>"
    told += "<|user|><tool_response>\n42\n</tool_response><|end|><|assistant|>"
    assert second.output_text == solo(told, 8)


def test_streamed_arguments_come_as_typed_events(client: openai.OpenAI) -> None:
    asked: Any = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, **GREEDY}
    events, final = read(client, input=PROMPT, **asked)
    assert kinds(events[2:]) == [*CALL_EVENTS, "completed"]
    assert sum(event.type.endswith("arguments.delta") for event in events) > 1
    with client.responses.stream(input=PROMPT, **asked) as stream:
        assert stream.get_final_response().output[0].name == final.output[0].name  # type: ignore[union-attr]


def test_text_before_a_call_is_an_item_of_its_own() -> None:
    pieces = [
        "Let",
        " me see.\n",
        "<tool_call>",
        '\n{"name": "add", ',
        '"arguments": {"a"',
        ": 1}}\n</tool_call>",
        " So.",
    ]
    model = scripted({"call": pieces}, "{{ tools }}<tool_call> {{ messages[-1].content }}")
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    asked: Any = {"model": "", "temperature": 0, "tools": [{**ADD, "strict": False}], "input": "call"}
    with serving(llm) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        events, final = read(client, **asked)
        assert kinds(events[2:]) == [*MESSAGE_EVENTS, *CALL_EVENTS, *MESSAGE_EVENTS, "completed"]
        whole = client.responses.create(**asked)
    for answer in (final, whole):
        before, call, after = answer.output
        assert (before.content[0].text, call.arguments) == ("Let me see.", '{"a": 1}')  # type: ignore[union-attr]
        assert after.content[0].text == "So."  # type: ignore[union-attr]
    asyncio.run(llm.shutdown())


PATCH = '*** Begin "Patch" é\U0001f600\n\\+1'
# What a model may write as the arguments of a custom tool, and the input that its client gets.
INPUTS: list[tuple[str, str]] = [
    (as_arguments(PATCH), PATCH),
    (json.dumps({"input": PATCH}), PATCH),
    (json.dumps(PATCH), PATCH),
    (f'{{ "input" : {json.dumps(PATCH)}, "more": 1 }}', PATCH),
    (r'{"input": "a\q\ud83d!\uZZ"}', "a\\q\ufffd!\\uZZ"),
    ('{"path": 1, "input": "x"}', "x"),
    ('{"text": "x"}', '{"text": "x"}'),
    ('{"input": 3}', '{"input": 3}'),
    ("*** Begin", "*** Begin"),
    ("{}", ""),
    (r'{"input": "cut \u00e', "cut "),
]


@pytest.mark.parametrize(("arguments", "text"), INPUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_input_of_a_custom_tool_comes_out_of_its_arguments_as_they_come(
    arguments: str, text: str, size: int
) -> None:
    reader = InputText()
    pieces = [reader.push(arguments[start : start + size]) for start in range(0, len(arguments), size)]
    assert "".join([*pieces, reader.finish()]) == text


APPLY: Any = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "text"}}


def test_a_custom_tool_is_called_with_a_text() -> None:
    pieces = ["<tool_call>", '\n{"name": "apply_patch", "arguments": {"inp', 'ut": "a\\', 'nb"', "}}\n</tool_call>"]
    model = scripted({"call": pieces}, "{{ tools }}<tool_call> {{ messages[-1].content }}")
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    asked: Any = {"model": "", "temperature": 0, "tools": [APPLY, ADD | {"strict": False}], "input": "call"}
    with serving(llm) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        events = list(client.responses.create(stream=True, **asked))
        whole = client.responses.create(**asked)
    asyncio.run(llm.shutdown())
    told = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert [event.delta for event in told] == ["a", "\nb"]
    assert kinds(events[2:]) == [
        name.replace("function_call_arguments", "custom_tool_call_input") for name in CALL_EVENTS
    ] + ["completed"]
    for answer in (events[-1].response, whole):  # type: ignore[union-attr]
        (call,) = answer.output
        assert isinstance(call, ResponseCustomToolCall)
        assert (call.name, call.input, call.to_dict()["status"]) == ("apply_patch", "a\nb", "completed")
        assert answer.tools[0].to_dict() == APPLY


def test_custom_tools_and_their_calls_are_functions_of_the_conversation() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    body = {
        "input": [
            {"role": "user", "content": "Go"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done"}]},
            {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"], "user": None}},
            {"type": "function_call_output", "call_id": "c2", "output": "a.py"},
        ],
        "tools": [APPLY | {"format": grammar}],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
    }
    ignored = Ignored()
    chat = fitted(body, ResponsesRequest, ignored).as_chat()
    assert ignored.names == ["tools.format"], "the model is told the grammar, and not held to it"
    calls = [call.function for message in chat.messages for call in message.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("apply_patch", {"input": PATCH}),
        ("local_shell", {"command": ["ls"]}),
    ]
    assert [(one.tool_call_id, one.content) for one in chat.messages if one.role == "tool"] == [
        ("c1", "Done"),
        ("c2", "a.py"),
    ]
    parameters = chat.tools[0].function.parameters or {}
    assert 'start: "x"' in parameters["properties"]["input"]["description"]
    assert not isinstance(chat.tool_choice, str) and chat.tool_choice.function.name == "apply_patch"


def test_a_text_may_be_held_to_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(input=PROMPT, text=form, max_output_tokens=60, **GREEDY)
    assert set(json.loads(answer.output_text)) == {"a"}
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"


def test_fields_that_ask_for_nothing_change_nothing(client: openai.OpenAI, solo: Solo) -> None:
    answer = client.responses.create(
        input=PROMPT,
        max_output_tokens=8,
        store=True,
        metadata={"run": "7"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        background=False,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=False,
        service_tier="auto",
        user="me",
        **GREEDY,
    )
    assert answer.output_text == solo(WITH_TEMPLATE, 8)
    assert answer.metadata == {"run": "7"}
    assert answer.model_extra is not None and answer.to_dict()["store"] is False, "nothing is stored"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio", "data": "a"}]}]},
            "input.0.content.0",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f", "image_url": "a"}]}]},
            "input.0.content.0.file_id",
        ),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "messages.0.content",
        ),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "background": 0}, "background"),
        ({"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "a", "tool_choice": "required"}, None),
        ({"input": "a", "tools": [{"type": "custom", "name": "a b"}]}, "tools.0.name"),
        ({"input": "a", "tools": [APPLY | {"format": {"type": "grammar"}}]}, "tools.0.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "n": 2}, "n"),
    ],
    ids=str,
)
def test_what_is_not_done_is_refused_with_its_name(server: Running, fields: dict[str, Any], param: str | None) -> None:
    response = server.post(PATH, {"max_output_tokens": 4, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"] and "\n" not in error["message"]
    until(server.is_idle)


def test_a_response_that_is_to_follow_another_one_says_that_none_is_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="stores no answers"):
        client.responses.create(input="a", previous_response_id="resp_1", **GREEDY)


def test_an_error_on_the_way_is_the_last_event(server: Running) -> None:
    with (
        serving(server.llm, request_timeout_s=0.2) as hasty,
        openai.OpenAI(base_url=f"{hasty.url}/v1", api_key="none") as client,
    ):
        fields: Any = {"extra_body": {"seed": 1, "temperature": 2.0}, "model": "demo-target"}
        events = list(client.responses.create(input=PROMPT, max_output_tokens=900, stream=True, **fields))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error is not None and "0.2 s" in events[-1].response.error.message
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_client_that_leaves_frees_its_place(server: Running) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream: Any = await client.responses.create(input=PROMPT, stream=True, **GREEDY)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()

    run(leave())  # the fixture waits until nothing is left of it


def test_the_tokens_of_an_input_are_counted_as_an_answer_counts_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "input": PROMPT, "instructions": "Be brief."}
    answer = client.responses.create(**asked, max_output_tokens=1)
    counted = client.responses.input_tokens.count(**asked)
    assert answer.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)


def test_an_input_that_fits_no_context_is_counted_too(server: Running) -> None:
    told = server.post(PATH + "/input_tokens", {"input": "word " * 5000}).json()
    assert told["input_tokens"] > 5000
