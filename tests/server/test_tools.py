"""Tools through other people's eyes: OpenAI's client calls functions by a real model's own choice and by force."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from card.api.async_llm import AsyncLLM
from tests.server.running import PROMPT, Running, Solo, run, serving, streams
from tests.server.scripted import scripted, served
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
GREEDY: Any = {"model": "demo-target", "temperature": 0.0}


def tool(name: str, **properties: Any) -> Any:
    """Return a function whose arguments are all required."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


ADD = tool("add", a={"type": "integer", "minimum": 0, "maximum": 99}, b={"enum": [1, 2]})
WEATHER = tool("get_weather", city={"enum": ["Berlin", "Paris"]})
TOOLS = [ADD, WEATHER]

SCRIPTS = {
    "call": ["Let", " me see.\n", "<tool_call>", '\n{"name": "add", ', '"arguments": {"a"', ": 1}}\n</tool_", "call>"],
    "two": ["<tool_call>", '{"name": "add"}</tool_call>\n<tool_', 'call>{"name": "get_weather"', "}</tool_call>"],
    "broken": ["<tool_call>", '{"name": "add", "arguments": {"a": }}', "</tool_call>", " so"],
    "stranger": ["<tool_call>", '{"name": "nobody", "arguments": {}}', "</tool_call>"],
    "endless": ["<tool_call>", '{"name": "add", "arguments": {"a": "', "aaaa", "bbbb"],
    "words": ["It is ", "{fine}", " and <b>", " all."],
}
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}<tool_call> {{ messages[-1].content }}"


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def speaker() -> Iterator[Running]:
    """Serve a model that writes what a script says, as Qwen's models write."""
    yield from served(scripted(SCRIPTS, TEMPLATE))


def spoken(server: Running, script: str, **fields: Any) -> dict[str, Any]:
    """Return the only choice of an answer, which must be the same streamed and not."""
    asked = {"messages": [{"role": "user", "content": script}], "tools": TOOLS, "temperature": 0, "max_tokens": 40}
    asked |= fields
    response = server.post(CHAT, asked)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    (read,) = streams(server.url, CHAT, [asked])
    assert (read.text, read.finish_reason) == (choice["message"]["content"] or "", choice["finish_reason"])
    assert without_ids(put_together(read.events)) == without_ids(choice["message"].get("tool_calls", []))
    return dict(choice)


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of a stream's first choice; id and name come first and once, arguments in pieces."""
    calls: list[dict[str, Any]] = []
    for event in events:
        for choice in event["choices"]:
            for told in choice["delta"].get("tool_calls", ()):
                if told["index"] == len(calls):
                    assert told["type"] == "function" and told["id"] and told["function"]["arguments"] == ""
                    calls.append({name: told[name] for name in ("id", "type", "function")})
                else:
                    assert told["index"] == len(calls) - 1 and set(told) == {"index", "function"}
                    calls[-1]["function"]["arguments"] += told["function"]["arguments"]
    return calls


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**call, "id": ""} for call in calls]


# ---- a model that calls by itself -----------------------------------------------------------------------------------


def test_a_call_of_the_models_own_choice_is_a_call_streamed_or_not(speaker: Running) -> None:
    choice = spoken(speaker, "call", logprobs=True)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert call["id"].startswith("call_")
    assert choice["message"]["content"] == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["logprobs"]["content"]) == len(SCRIPTS["call"]) + 1, "those of the call's tokens are there too"


def test_several_calls_are_several_unless_one_is_wanted(speaker: Running) -> None:
    calls = spoken(speaker, "two")["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["add", "get_weather"]
    assert len({call["id"] for call in calls}) == 2
    choice = spoken(speaker, "two", parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("script", ["stranger", "words"])
def test_what_is_no_call_is_content_word_for_word(speaker: Running, script: str) -> None:
    choice = spoken(speaker, script)
    assert choice["message"] == {"role": "assistant", "content": "".join(SCRIPTS[script]), "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("script", "arguments"), [("broken", '{"a": }'), ("endless", '{"a": "aaaabbbb')])
def test_a_call_has_its_arguments_as_they_were_written_even_broken_ones(
    speaker: Running, script: str, arguments: str
) -> None:
    (call,) = spoken(speaker, script)["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": arguments}


def test_a_call_that_max_tokens_cuts_ends_by_length_with_what_was_written(speaker: Running) -> None:
    choice = spoken(speaker, "endless", max_tokens=3)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "aaaa'


def test_what_is_cut_off_before_it_can_be_a_call_is_content_and_the_reason_is_the_length(speaker: Running) -> None:
    choice = spoken(speaker, "call", max_tokens=3)
    assert choice["message"]["content"] == "".join(SCRIPTS["call"][:3])
    assert choice["finish_reason"] == "length"


def test_a_stop_string_ends_the_content_and_no_call(speaker: Running) -> None:
    choice = spoken(speaker, "two", stop=['"', "add", "\n"])
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add", "get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    choice = spoken(speaker, "call", stop=" see")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me", "stop")
    assert "tool_calls" not in choice["message"]


def test_without_tools_or_with_none_to_choose_a_call_is_text(speaker: Running) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
        message = spoken(speaker, "two", **fields)["message"]
        assert message["content"] == "".join(SCRIPTS["two"])
        assert "tool_calls" not in message


def test_the_chat_template_is_told_of_the_tools_that_may_be_called(speaker: Running) -> None:
    counted = []
    for fields in ({"tools": []}, {"tools": [ADD]}, {}, {"tool_choice": "none"}):
        body = {"messages": [{"role": "user", "content": "words"}], "tools": TOOLS, "max_tokens": 1, **fields}
        counted.append(speaker.post(CHAT, body).json()["usage"]["prompt_tokens"])
    assert counted == [2, 3, 4, 2]


def test_a_special_token_marks_calls_where_a_vocabulary_has_one_for_them() -> None:
    pieces = ["[TOOL_CALLS]", '[{"name": "add", ', '"arguments": {}}', "]"]
    model = scripted({"call": pieces}, "{{ tools }}[TOOL_CALLS] {{ messages[-1].content }}", ("[TOOL_CALLS]",))
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    with serving(llm, served_model_names=("scripted",)) as server:
        (call,) = spoken(server, "call")["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": "{}"}
        assert len(call["id"]) == 9 and call["id"].isalnum(), "Mistral's templates refuse other ids"
        plain = server.post(CHAT, {"messages": [{"role": "user", "content": "call"}], "temperature": 0}).json()
        assert plain["choices"][0]["message"]["content"] == "".join(pieces[1:]), "special tokens are no text otherwise"
    asyncio.run(llm.shutdown())


def test_a_template_with_tools_in_an_unknown_format_is_refused_unless_a_parser_is_named() -> None:
    model = scripted({"call": SCRIPTS["call"]}, "{% if tools %}<other>{% endif %} {{ messages[-1].content }}")
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    body = {"messages": [{"role": "user", "content": "call"}], "tools": TOOLS, "temperature": 0, "max_tokens": 20}
    with serving(llm) as server:
        response = server.post(CHAT, body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert "--answer-format" in response.json()["error"]["message"]
    asyncio.run(llm.shutdown())
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla", answer_format="hermes")
    with serving(llm) as server:
        assert server.post(CHAT, body).json()["choices"][0]["finish_reason"] == "tool_calls"
    asyncio.run(llm.shutdown())


def test_a_template_without_a_role_for_the_system_is_told_of_tools_in_the_users_first_turn() -> None:
    """Gemma 2 and the first Mistral refuse system messages, and two turns of the user in a row."""
    refusing = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role == 'system' %}"
        "{{ raise_exception('System role not supported, roles must alternate') }}{% endif %}"
        "{{ m.role }} {{ m.content }} {% endfor %}"
    )
    model = scripted(SCRIPTS, refusing)
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "add"}]
    results = [{"role": "assistant", "tool_calls": [call, call]}, *([{"role": "tool", "content": "3"}] * 2)]
    with serving(llm, served_model_names=("scripted",)) as server:
        for messages in ([], said[:1], said, [*said, *results]):
            history = [*messages, {"role": "user", "content": "call"}]
            choice = spoken(server, "call", messages=history)
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
        plain = spoken(server, "words", messages=[said[0], {"role": "user", "content": "words"}], tools=None)
        assert plain["message"]["content"] == "".join(SCRIPTS["words"])
    asyncio.run(llm.shutdown())


@pytest.mark.parametrize("arguments", ['{"a": "12', "", "a=1", "[1]", "7", "[" * 200, '{"a": 1}}'])
def test_arguments_that_are_no_json_of_an_object_are_told_the_model_as_they_are(
    server: Running, speaker: Running, arguments: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    history = [{"role": "user", "content": "add"}, {"role": "assistant", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "1", "content": "no JSON"}]
    for running in (server, speaker):
        body = {"messages": [*history, {"role": "user", "content": "words"}], "tools": TOOLS, "max_tokens": 2}
        answer = running.post(CHAT, body)
        assert answer.status_code == 200, answer.text
    items = [{"type": "function_call", "call_id": "1", "name": "add", "arguments": arguments}]
    items += [{"type": "function_call_output", "call_id": "1", "output": "no JSON"}]
    assert server.post("/v1/responses", {"input": items, "max_output_tokens": 2}).status_code == 200


def test_a_call_that_was_cut_off_goes_back_and_the_conversation_goes_on(server: Running) -> None:
    asked = {"messages": MESSAGES, "tools": [ADD], "tool_choice": "required", "temperature": 0, "max_tokens": 38}
    (choice,) = server.post(CHAT, asked).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "cut off"}
    answer = server.post(CHAT, {**asked, "messages": [*MESSAGES, choice["message"], result]})
    assert answer.status_code == 200, answer.text


# ---- calls by force -------------------------------------------------------------------------------------------------


def test_a_loop_of_openais_client_calls_a_function_and_answers_with_its_result(
    client: openai.OpenAI, solo: Solo
) -> None:
    first = client.chat.completions.create(
        messages=MESSAGES, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}}, **GREEDY
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None and message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "add"
    given = json.loads(call.function.arguments)
    assert set(given) == {"a", "b"} and 0 <= given["a"] <= 99 and given["b"] in (1, 2)
    result = str(given["a"] + given["b"])
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    second = client.chat.completions.create(messages=history, max_tokens=12, **GREEDY)
    called = f'<tool_call>\n{{"name": "add", "arguments": {call.function.arguments}}}\n</tool_call>'
    told = f"<|user|>{PROMPT}<|end|><|assistant|>{called}<|end|>"
    told += f"<|user|><tool_response>\n{result}\n</tool_response><|end|><|assistant|>"
    assert second.choices[0].message.content == solo(told, 12)


def test_a_forced_call_comes_in_pieces_with_its_name_first(server: Running) -> None:
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    asked |= {"temperature": 0, "stream_options": {"include_usage": True}, "logprobs": True}
    (read,) = streams(server.url, CHAT, [asked])
    (call,) = put_together(read.events)
    json.loads(call["function"]["arguments"])
    pieces = [c["delta"]["tool_calls"] for e in read.events for c in e["choices"] if "tool_calls" in c["delta"]]
    assert len(pieces) > 3, "the arguments come as they are written"
    assert (read.text, read.finish_reason, read.is_done) == ("", "tool_calls", True)
    told = [t for e in read.events for c in e["choices"] for t in (c["logprobs"] or {}).get("content", ())]
    assert len(told) == read.events[-1]["usage"]["completion_tokens"]


def test_a_model_that_must_call_calls_once_unless_several_calls_are_asked_for(server: Running) -> None:
    asked = {"messages": MESSAGES, "tools": [ADD], "tool_choice": "required", "temperature": 0, "max_tokens": 100}
    (choice,) = server.post(CHAT, asked).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
    (choice,) = server.post(CHAT, {**asked, "parallel_tool_calls": True}).json()["choices"]
    assert len(choice["message"]["tool_calls"]) > 1, "this model never stops by itself"
    asked = {"input": PROMPT, "tools": [{"type": "function", **ADD["function"]}], "tool_choice": "required"}
    answer = server.post("/v1/responses", {**asked, "temperature": 0, "max_output_tokens": 100}).json()
    assert (answer["status"], answer["parallel_tool_calls"], len(answer["output"])) == ("completed", False, 1)


def test_each_of_several_choices_makes_its_own_calls(server: Running) -> None:
    asked = {"messages": MESSAGES, "tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    asked |= {"n": 3, "seed": 3, "temperature": 1.5}
    choices = server.post(CHAT, asked).json()["choices"]
    texts = [choice["message"]["tool_calls"][0]["function"]["arguments"] for choice in choices]
    assert all(set(json.loads(text)) == {"a", "b"} for text in texts)
    assert len(set(texts)) > 1
    (read,) = streams(server.url, CHAT, [asked])
    for choice_idx, text in enumerate(texts):
        events = [{"choices": [c for c in event["choices"] if c["index"] == choice_idx]} for event in read.events]
        assert put_together(events)[0]["function"]["arguments"] == text


def test_forced_calls_that_are_cut_off_keep_what_was_written(server: Running) -> None:
    asked = {"messages": MESSAGES, "tools": [ADD], "tool_choice": "required", "temperature": 0}
    whole = server.post(CHAT, {**asked, "parallel_tool_calls": False}).json()["choices"][0]["message"]["tool_calls"]
    for max_tokens in (5, 38):
        choice = server.post(CHAT, {**asked, "max_tokens": max_tokens}).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        calls = choice["message"].get("tool_calls", [])
        assert all(whole[0]["function"]["arguments"].startswith(call["function"]["arguments"]) for call in calls)
        assert not choice["message"]["content"]
    assert calls and calls[0]["function"]["arguments"]


def test_a_schema_with_definitions_of_its_own_holds_the_arguments(server: Running) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"]}
    schema |= {"additionalProperties": False, "$defs": {"X": {"enum": [7]}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    asked = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "temperature": 0}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = server.post(CHAT, asked).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": 7}


def test_a_function_without_parameters_is_called_with_none(server: Running) -> None:
    asked = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "now"}}], "temperature": 0}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = server.post(CHAT, asked).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


def test_with_a_response_format_the_answer_is_a_call_or_fits_it(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["forty", "two"]}}}
    asked = {"messages": MESSAGES, "tools": TOOLS, "temperature": 0, "response_format": form, "max_tokens": 60}
    for change in ({}, {"temperature": 2.0, "seed": 1, "n": 4}):
        for choice in server.post(CHAT, {**asked, **change}).json()["choices"]:
            calls = choice["message"].get("tool_calls", [])
            assert calls or json.loads(choice["message"]["content"]) in ("forty", "two")


def test_a_strict_function_leaves_the_model_free_not_to_call(server: Running) -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    asked = {"messages": MESSAGES, "tools": [strict], "temperature": 0, "max_tokens": 12}
    message = server.post(CHAT, asked).json()["choices"][0]["message"]
    plain = server.post(CHAT, {**asked, "tools": [ADD]}).json()["choices"][0]["message"]
    assert message["content"] == plain["content"] and "tool_calls" not in message


def test_a_client_that_leaves_a_stream_of_calls_frees_its_place(server: Running) -> None:
    endless = tool("say", text={"type": "string"})
    body = {"messages": MESSAGES, "tools": [endless], "tool_choice": "required", "max_tokens": 400, "stream": True}

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream: Any = await client.chat.completions.create(model="demo-target", **body)
            async for event in stream:
                if event.choices[0].delta.tool_calls:
                    break
            await stream.close()

    run(leave())  # the fixture waits until nothing is left of it


# ---- what cannot be done --------------------------------------------------------------------------------------------

BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
UNKNOWN_KEY = tool("f", a={"not": {"type": "string"}})["function"]["parameters"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS}, None, "not among the tools"),
        ({"tools": [ADD, ADD]}, None, "needs a different name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tools": [tool("no good")]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name", "pattern"),
        ({"tools": [{"type": "custom"}]}, "tools.0.custom", "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, None, "not among the tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, None, "object"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA}}],
                "tool_choice": "required",
            },
            "tools",
            "nonsense",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": UNKNOWN_KEY, "strict": True}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
        ({"tools": TOOLS, "guided_regex": "a+"}, "guided_regex", "does not go with"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "required form"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": []}, {"role": "tool"}]},
            "messages.1.content",
            "",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages.0", "role tool"),
    ],
    ids=str,
)
def test_tools_that_cannot_be_are_refused_with_the_reason(
    server: Running, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 60, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert message in error["message"] and "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param
    until(server.is_idle)


def test_what_llguidance_does_not_know_of_a_schema_is_left_to_the_model_if_strict_is_false(server: Running) -> None:
    schema = {**UNKNOWN_KEY, "properties": {"a": {"enum": [1], "not": {"const": 2}}}}
    function = {"name": "f", "parameters": schema, "strict": False}
    asked = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "temperature": 0}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    (call,) = server.post(CHAT, asked).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] == 1


def _asks_for(schema: dict[str, Any], strict: bool | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way to ask for an object of a schema: path and fields."""
    given = {} if strict is None else {"strict": strict}
    function = {"name": "f", "parameters": schema, **given}
    tools = [{"type": "function", "function": function}]
    form = {"name": "f", "schema": schema, **given}
    yield CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": form}}
    yield CHAT, {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    yield "/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", **form}}}
    yield "/v1/responses", {"input": "x", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    if strict:
        yield CHAT, {"messages": MESSAGES, "tools": tools}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "alternatives of oneOf exclude each other; use anyOf"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "alternatives of oneOf exclude each other; use anyOf"),
        ({"type": "integer", "not": {"const": 2}}, "not"),
        ({"type": "string", "format": "json-pointer"}, "Unknown format: json-pointer"),
    ],
    ids=str,
)
def test_what_a_grammar_cannot_hold_is_refused_if_it_is_strict_and_of_a_tool_only_then(
    server: Running, value: dict[str, Any], said: str
) -> None:
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    for strict in (None, True, False):
        for path, fields in _asks_for(schema, strict):
            limit = "max_tokens" if path == CHAT else "max_output_tokens"
            response = server.post(path, {limit: 1, **fields})
            if strict is False or (strict is None and "tools" in fields):
                assert response.status_code == 200, response.text
                continue
            assert response.status_code == 400, response.text
            message = response.json()["error"]["message"]
            assert said in message and "strict to false" in message and "\n" not in message and "<tool" not in message
