"""Bodies whose shape alone would cost others their time or the machine its memory; and large ones that cost nothing."""

from __future__ import annotations

import gzip
import json
import threading
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.server import bodies
from card.server.bodies import LARGE_BYTES, fitted
from card.server.errors import ApiError
from card.server.response_schemas import ResponsesRequest
from card.server.schemas import MAX_MESSAGES, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from card.server.shape import MAX_CONTAINERS, MAX_DECIMALS, MAX_DEPTH, MAX_MEMBERS, containers_in, shape_of
from card.server.tool_schemas import decoded_arguments
from tests.server.running import PROMPT, Running

pytestmark = pytest.mark.timeout(240)

USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"


# ---- shapes ---------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(st.sampled_from('a"\\[]{},:.e1é\n'), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('"\\[{:a'), max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def counted(value: object, depth: int = 0) -> tuple[int, int, int]:
    """Return containers, members and depth by walking through a value."""
    if not isinstance(value, dict | list):
        return 0, 0, depth
    parts = [counted(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
    members = len(value) if isinstance(value, dict) else 0
    most = max([depth + 1, *(part[2] for part in parts)])
    return 1 + sum(part[0] for part in parts), members + sum(part[1] for part in parts), most


@given(JSON, st.booleans())
def test_the_shape_of_a_text_is_that_of_the_value(value: object, is_ascii: bool) -> None:
    inside = [value] * 200 + [{}] * MAX_DEPTH  # enough that it is looked at
    shape = shape_of(json.dumps(inside, ensure_ascii=is_ascii).encode())
    assert (shape.containers, shape.members, shape.depth) == counted(inside)


@pytest.mark.parametrize("encoding", ["gzip", "br, gzip"])
def test_a_compressed_body_is_refused_as_what_it_is(server: Running, encoding: str) -> None:
    body = gzip.compress(json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode())
    refused = server.post("/v1/completions", body, headers={"Content-Encoding": encoding})
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "content_encoding")
    assert encoding in refused.json()["error"]["message"]
    plain = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    assert server.post("/v1/completions", plain, headers={"Content-Encoding": "identity"}).status_code == 200


def test_a_shape_is_seen_across_pieces() -> None:
    texts = ['"\\{['[: 1 + i % 4] * (i % 300) for i in range(2000)]
    value = [{"text": text, "n": [1.5, 2]} for text in texts]
    shape = shape_of(json.dumps(value).encode())
    assert (shape.containers, shape.members, shape.depth) == counted(value)
    assert shape.decimals == 2000
    assert containers_in(json.dumps(value)) == shape.containers


@pytest.mark.parametrize(
    "value",
    [
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "[" + ",".join(["{}"] * MAX_CONTAINERS) + "]",
        "{" + ",".join(['"":1'] * (MAX_MEMBERS + 1)) + "}",
        "[" + ",".join(["1e5"] * (MAX_DECIMALS + 1)) + "]",
        "[" + ",".join(["9" * 4299] * 10) + "]",
    ],
    ids=["depth", "containers", "members", "decimals", "digits"],
)
def test_what_becomes_far_more_than_it_is_written_in_is_never_decoded(
    server: Running, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(bodies.msgspec.json, "decode", decoded.append)
    body = f'{{"messages": [], "chat_template_kwargs": {{"a": {value}}}}}'.encode()
    error = server.post(CHAT, body)
    assert (error.status_code, error.json()["error"]["code"]) == (400, "body_too_complex")
    assert "at most" in error.json()["error"]["message"]
    assert not decoded


def test_what_ordinary_clients_send_is_far_from_all_bounds(server: Running) -> None:
    properties = {
        f"field_{i}": {"type": "string", "description": "x" * 100, "enum": ["[a]", "{b}"]} for i in range(1500)
    }
    large = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": large if not i else {}}} for i in range(200)
    ]
    assert len(json.dumps(large)) > 200_000
    call = {"id": "1", "type": "function", "function": {"name": "f1", "arguments": '{"code": "a[0] = {1: [2]}"}'}}
    turn = [
        {"role": "user", "content": [{"type": "text", "text": "if (a[0]) { b(); }"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    body = json.dumps({"messages": turn * 700, "tools": tools, "max_tokens": 1}).encode()
    assert shape_of(body).excess() is None
    assert len(fitted(json.loads(body), ChatRequest).messages) == 2100
    answer = server.post(CHAT, body)
    assert answer.status_code == 400, "no small model has such a context"
    assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


# ---- the first error ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {"messages": [{}] * 5000}),
        (ChatRequest, {"messages": [{"role": "king"}] * 5000}),
        (ChatRequest, {"messages": [USER] * (MAX_MESSAGES + 1)}),
        (ChatRequest, {"messages": [USER], "tools": [{}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 5000}]}),
        (ChatRequest, {"messages": [{**USER, "role": "assistant", "tool_calls": [{}] * 1000}]}),
        (ChatRequest, {"messages": [USER], "modalities": ["audio"] * 5000}),
        (ChatRequest, {"messages": [USER], **{f"unknown{i}": 1 for i in range(5000)}}),
        (ChatRequest, {"messages": [{**USER, **{f"unknown{i}": 1 for i in range(5000)}}]}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}),
        (CompletionRequest, {"prompt": "a", "metadata": {str(i): 1 for i in range(5000)}}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 5000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 1000}),
        (CompletionRequest, {"prompt": [{}] * 5000}),
        (CompletionRequest, {"prompt": [["x"]] * 2000}),
        (ResponsesRequest, {"input": [{}] * 5000}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{}] * 5000}]}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "text"}] * 5000}]}),
        (ResponsesRequest, {"input": [{"type": "function_call_output", "call_id": "1", "output": [{}] * 5000}]}),
        (ResponsesRequest, {"input": "a", "tools": [{}] * 1000}),
        (TokenizeRequest, {"messages": [{}] * 5000}),
        (DetokenizeRequest, {"tokens": ["x"] * 5000}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_few_errors_are_collected_however_many_there_are(
    model: type[pydantic.BaseModel], fields: dict[str, Any]
) -> None:
    with pytest.raises(pydantic.ValidationError) as wrong:
        model.model_validate(fields)
    assert wrong.value.error_count() <= 10
    with pytest.raises(ApiError) as told:
        fitted(fields, model)
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("name", ["x" * 1_000_000, "a\nb", "\x00" * 1000, "tab\t"], ids=lambda name: repr(name[:5]))
def test_an_error_is_one_short_line_whatever_a_field_is_called(strict_server: Running, name: str) -> None:
    error = strict_server.post("/v1/completions", {"prompt": PROMPT, name: 1}).json()["error"]
    assert error["code"] == "unsupported_parameter"
    assert error["message"].isprintable() and len(error["message"]) < 500
    assert len(error["param"]) < 500


def test_the_name_of_a_wrong_field_comes_before_its_neighbours_values(strict_server: Running) -> None:
    error = strict_server.post("/v1/completions", {"prompt": 5, "unknown": 1, "other": 2}).json()["error"]
    assert error["param"] == "unknown"


@pytest.mark.parametrize(("field", "advice"), [("tempratur", "did you mean temperature?"), ("colour", "leave it out")])
def test_a_field_with_a_typo_is_told_what_was_meant(strict_server: Running, field: str, advice: str) -> None:
    error = strict_server.post("/v1/completions", {"prompt": PROMPT, field: 1}).json()["error"]
    assert error["message"] == f"{field} is not supported by this server; {advice}"


def test_arguments_of_calls_keep_to_the_bounds_of_a_body() -> None:
    def asked(num_calls: int) -> dict[str, Any]:
        arguments = '{"a": [' + ",".join(["[]"] * 9000) + "]}"
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call] * num_calls}]}

    fitted(asked(11), ChatRequest)
    with pytest.raises(ApiError) as refused:
        fitted(asked(12), ChatRequest)
    assert refused.value.status == 400


def test_arguments_that_are_nested_too_deeply_stay_a_text() -> None:
    deep = '{"a":' * 200 + "1" + "}" * 200
    assert decoded_arguments(deep) == deep
    assert decoded_arguments(' {"a": 1} ') == {"a": 1}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ude00\uD83D\ud83d\ude00x", "\ufffd\ufffd\U0001f600x"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d\u0041", "\\\ufffdA"),
    ],
)
def test_half_a_character_in_arguments_is_the_one_that_stands_for_what_no_text_holds(written: str, text: str) -> None:
    assert decoded_arguments(f'{{"p": "{written}"}}') == {"p": text}


def test_detokenize_takes_several_contexts_of_ids_and_no_more(server: Running) -> None:
    most = server.client.get("/openapi.json").json()["components"]["schemas"]["DetokenizeRequest"]["properties"]
    most_ids = most["tokens"]["maxItems"]
    assert most_ids >= 2 * server.llm.max_model_len
    assert server.post("/detokenize", {"tokens": [5] * most_ids}).status_code == 200
    error = server.post("/detokenize", {"tokens": [5] * (most_ids + 1)})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "tokens")


# ---- beside the event loop ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_body_is_worked_on_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, is_large: bool
) -> None:
    threads: list[str] = []
    validate, conversation = bodies.fitted, server.service.tools.conversation

    def noted(function: Any) -> Any:
        def run(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args)

        return run

    monkeypatch.setattr(bodies, "fitted", noted(validate))
    monkeypatch.setattr("card.server.response_schemas.fitted", noted(validate))
    monkeypatch.setattr(server.service.tools, "conversation", noted(conversation))
    content = "hi " * (LARGE_BYTES if is_large else 10)
    name = "input" if path == "/v1/responses" else "messages"
    length: dict[str, Any] = {CHAT: {"max_tokens": 1}, "/v1/responses": {"max_output_tokens": 16}}.get(path, {})
    server.post(path, {name: [{"role": "user", "content": content}], **length})
    assert len(threads) >= 2
    assert {thread.startswith("card-body") for thread in threads} == {is_large}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_tokens", [10, 900])
def test_an_answer_with_many_log_probabilities_is_put_together_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_streamed: bool
) -> None:
    threads: list[str] = []
    names = server.service.names
    told = names.completion_logprobs

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return told(*args)

    monkeypatch.setattr(names, "completion_logprobs", noted)
    asked = {"prompt": [5] * num_tokens, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": is_streamed}
    assert server.post("/v1/completions", asked).status_code == 200
    assert threads[0].startswith("card-body") == (num_tokens == 900)


@pytest.mark.parametrize("part", [{}, {"text": None}, {"text": 3}], ids=str)
def test_a_part_without_a_text_is_refused_in_words(part: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError, match="a part of type text must have a string named text, got "):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [{"type": "text", **part}]}]})
