"""Shapes of requests that clients send: each is taken and answered in its form, or refused in its form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from card.api.async_llm import AsyncLLM
from tests.server import shapes
from tests.server.running import Running, serving
from tests.server.scripted import scripted_bytes
from tests.server.shapes import SAID, SHAPES, Said, Shape
from tests.server.test_anthropic import events, joined
from tests.server.test_parts import THINKING_TEMPLATE

pytestmark = pytest.mark.timeout(60)

SHARE = 58 / 63  # of the shapes that must be taken


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    """Serve a model that thinks, calls functions and fills gaps."""
    model = scripted_bytes(shapes.SCRIPTS, THINKING_TEMPLATE)
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    with serving(llm, served_model_names=("card",)) as running:
        yield running
    asyncio.run(llm.shutdown())


# ---- what answers say ------------------------------------------------------------------------------------------------


def calls(told: list[dict[str, Any]]) -> tuple[tuple[str, Any], ...]:
    assert all(one["id"] and one["type"] == "function" for one in told)
    return tuple((one["function"]["name"], json.loads(one["function"]["arguments"])) for one in told)


def chat(answer: httpx2.Response) -> Said:
    choice = answer.json()["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    called = calls(message.get("tool_calls", []))
    assert reason == ("tool_calls" if called else "stop") and answer.json()["usage"]["completion_tokens"] > 0
    return Said(message["content"] or "", message.get("reasoning_content", ""), called)


def data(answer: httpx2.Response) -> list[dict[str, Any]]:
    """Return the events of a stream that ends as OpenAI's do."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *told, end = [one.removeprefix("data: ") for one in answer.text.strip().split("\n\n") if one != ":"]
    assert end == "[DONE]"
    return [json.loads(one) for one in told]


def chat_stream(answer: httpx2.Response) -> Said:
    text, thoughts, reason = "", "", None
    called: list[dict[str, Any]] = []
    for event in data(answer):
        for choice in event["choices"]:
            assert event["object"] == "chat.completion.chunk" and reason is None
            delta, reason = choice["delta"], choice["finish_reason"]
            text, thoughts = text + delta.get("content", ""), thoughts + delta.get("reasoning_content", "")
            for one in delta.get("tool_calls", ()):
                if one["index"] == len(called):
                    called.append(one)
                else:
                    called[one["index"]]["function"]["arguments"] += one["function"]["arguments"]
    assert reason == ("tool_calls" if called else "stop")
    return Said(text, thoughts, calls(called))


def completion(answer: httpx2.Response) -> Said:
    (choice,) = answer.json()["choices"]
    assert answer.json()["object"] == "text_completion" and choice["finish_reason"] == "stop"
    return Said(choice["text"])


def completion_stream(answer: httpx2.Response) -> Said:
    told = [choice for event in data(answer) for choice in event["choices"]]
    assert told[-1]["finish_reason"] == "stop"
    return Said("".join(one["text"] for one in told))


def items(response: dict[str, Any]) -> Said:
    assert response["status"] == "completed" and response["usage"]["output_tokens"] > 0
    text, thoughts, called = "", "", []
    for item in response["output"]:
        assert item["id"] and item["status"] == "completed"
        match item["type"]:
            case "message":
                text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                thoughts += "".join(part["text"] for part in item["content"])
            case "function_call":
                called.append((item["name"], json.loads(item["arguments"])))
            case kind:
                assert kind == "custom_tool_call" and item["call_id"]
                called.append((item["name"], item["input"]))
    return Said(text, thoughts, tuple(called))


def response_stream(answer: httpx2.Response) -> Said:
    told = events(answer.text)
    assert [one["type"] for one in told[:2]] == ["response.created", "response.in_progress"]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    said = items(told[-1]["response"])
    pieces = {one["type"]: "" for one in told if one["type"].endswith(".delta")}
    for one in told:
        if one["type"] in pieces:
            pieces[one["type"]] += one["delta"]
    assert pieces.get("response.output_text.delta", "") == said.text
    assert pieces.get("response.reasoning_text.delta", "") == said.thoughts
    assert pieces.get("response.custom_tool_call_input.delta", "") == "".join(
        one for _, one in said.calls if isinstance(one, str)
    )
    return said


def blocks(message: dict[str, Any]) -> Said:
    by_kind: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for block in message["content"]:
        by_kind[block["type"]].append(block)
    called = tuple((one["name"], one["input"]) for one in by_kind["tool_use"])
    assert message["stop_reason"] == ("tool_use" if called else "end_turn")
    text, thoughts = ("".join(one[kind] for one in by_kind[kind]) for kind in ("text", "thinking"))
    return Said(text, thoughts, called)


def ollama(told: list[dict[str, Any]]) -> Said:
    assert [one["done"] for one in told] == [False] * (len(told) - 1) + [True] and told[-1]["done_reason"]
    messages = [one.get("message") or {**one, "content": one["response"]} for one in told]
    text, thoughts = ("".join(one.get(name, "") for one in messages) for name in ("content", "thinking"))
    called = [call["function"] for one in messages for call in one.get("tool_calls", ())]
    return Said(text, thoughts, tuple((one["name"], one["arguments"]) for one in called))


def infill_stream(answer: httpx2.Response) -> Said:
    told = [json.loads(one.removeprefix("data: ")) for one in answer.text.strip().split("\n\n")]
    return Said("".join(one["content"] for one in told if "content" in one))


READERS: dict[str, tuple[Callable[[httpx2.Response], Said], Callable[[httpx2.Response], Said]]] = {
    shapes.CHAT: (chat, chat_stream),
    shapes.COMPLETION: (completion, completion_stream),
    shapes.RESPONSE: (lambda answer: items(answer.json()), response_stream),
    shapes.MESSAGE: (
        lambda answer: blocks(answer.json()),
        lambda answer: blocks(joined([one for one in events(answer.text) if one["type"] != "ping"])),
    ),
    shapes.INFILL: (lambda answer: Said(answer.json()["content"]), infill_stream),
    **dict.fromkeys(
        (shapes.OLLAMA_CHAT, shapes.OLLAMA_GENERATE),
        (
            lambda answer: ollama([answer.json()]),
            lambda answer: ollama([json.loads(line) for line in answer.text.splitlines()]),
        ),
    ),
}
FIGURES = {  # a field of what is answered without text
    shapes.COUNT: "input_tokens",
    shapes.INPUT_TOKENS: "input_tokens",
    "/v1/models": "data",
    "/api/tags": "models",
    "/api/show": "capabilities",
    "/api/version": "version",
    "/tokenize": "tokens",
}


# ---- the shapes ------------------------------------------------------------------------------------------------------


def send(server: Running, shape: Shape, **more: Any) -> httpx2.Response:
    method = shape.method or ("GET" if shape.body is None else "POST")
    body = None if shape.body is None else {**shape.body, **more}
    return server.client.request(method, shape.door, json=body, headers=dict(shape.headers))


def check_refused(shape: Shape, answer: httpx2.Response) -> None:
    """Check that an error has the form of its door, and says something in one line."""
    error = answer.json()["error"]
    if shape.door.startswith("/api/"):
        message = error
    else:
        message = error["message"]
        assert error["type"]
        assert (answer.json().get("type") == "error") == shape.door.startswith("/v1/messages")
    assert message and "\n" not in message


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_clients_request_is_answered_or_refused_in_its_form(own: Running, shape: Shape) -> None:
    for stream in (False, True):
        if stream and shape.door not in READERS:
            continue
        answer = send(own, shape, **({"stream": stream} if shape.door in READERS else {}))
        assert answer.status_code == shape.status, answer.text[:400]
        if shape.status != 200:
            check_refused(shape, answer)
            continue
        assert set(answer.headers.get("x-card-ignored", "").split(", ")) == set(shape.ignored or ("",))
        if shape.door in READERS:
            assert READERS[shape.door][stream](answer) == SAID[shape.says]
        elif shape.door in FIGURES:
            assert answer.json()[FIGURES[shape.door]]


def test_nearly_all_shapes_are_taken() -> None:
    assert len(SHAPES) >= 63 and len({shape.client for shape in SHAPES}) == len(SHAPES)
    assert sum(shape.status == 200 for shape in SHAPES) >= SHARE * len(SHAPES)
