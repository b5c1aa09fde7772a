"""Tool calls by models that were trained to make them: Qwen2.5-Coder as scripts/fetch_weights.py saves it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from card.api.async_llm import AsyncLLM
from tests.server.running import Running, serving

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

MODELS = ("qwen-0.5b", "qwen-1.5b")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris right now?"}]
GREEDY: Any = {"model": "qwen", "temperature": 0, "max_tokens": 80}


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    folder = Path(os.environ.get("CARD_WEIGHTS", "")).expanduser() / f"{request.param}-bfloat16"
    assert os.environ.get("CARD_WEIGHTS"), "set CARD_WEIGHTS to the folder that scripts/fetch_weights.py wrote"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; run python scripts/fetch_weights.py {request.param}")
    llm = AsyncLLM(str(folder), method="lookup", max_model_len=1024, grammar_timeout_s=600.0)
    with serving(llm, served_model_names=("qwen",)) as running:
        yield running
    asyncio.run(llm.shutdown())


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=900) as client:
        yield client


def test_the_model_calls_a_function_by_itself_and_answers_with_its_result(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(messages=QUESTION, tools=[WEATHER], **GREEDY)
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Paris"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature_celsius": 17, "sky": "cloudy"}'}
    second = client.chat.completions.create(messages=[*QUESTION, message, result], **GREEDY)
    assert "17" in (second.choices[0].message.content or "")


def test_the_same_call_comes_streamed_and_as_a_response(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, tools=[WEATHER], **GREEDY).choices[0].message
    assert whole.tool_calls is not None and whole.tool_calls[0].type == "function"
    wanted = whole.tool_calls[0].function
    told = ["", ""]
    for event in client.chat.completions.create(messages=QUESTION, tools=[WEATHER], stream=True, **GREEDY):
        for piece in event.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            told[0] += piece.function.name or ""
            told[1] += piece.function.arguments or ""
    assert told == [wanted.name, wanted.arguments]
    tools: Any = [{"type": "function", **WEATHER["function"]}]
    answer = client.responses.create(
        model="qwen", input=QUESTION, tools=tools, temperature=0, max_output_tokens=GREEDY["max_tokens"]
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [(wanted.name, wanted.arguments)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_fits_and_names_the_city(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        messages=QUESTION, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, **GREEDY
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
