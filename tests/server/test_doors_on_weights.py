"""What coding agents ask of a pair that was trained for it: gaps, calls, reading ahead, a warm start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from card.api.async_llm import AsyncLLM
from tests.server.running import Running, serving
from tests.waiting import until

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

CHAT = "/v1/chat/completions"
GAP = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(2, 3))\n"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris right now?"}
RULES = "".join(f"{idx}. Answer question {idx} in one word, and never in two.\n" for idx in range(30))


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Running]:
    """Serve the pair of `scripts/fetch_weights.py --gguf` with a folder for rows."""
    assert os.environ.get("CARD_WEIGHTS"), "set CARD_WEIGHTS to the folder that scripts/fetch_weights.py wrote"
    pair = [Path(os.environ["CARD_WEIGHTS"]).expanduser() / f"qwen-{size}.gguf" for size in ("1.5b", "0.5b")]
    if missing := [file.name for file in pair if not file.is_file()]:
        pytest.skip(
            f"{' and '.join(missing)} not there; run python scripts/fetch_weights.py --gguf qwen-0.5b qwen-1.5b"
        )
    llm = AsyncLLM(*map(str, pair), max_model_len=4096, prefix_cache=str(folder))
    try:
        with serving(llm, served_model_names=("qwen",)) as running:
            running.client.timeout = 900.0
            yield running
    finally:
        asyncio.run(llm.shutdown())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def server(rows: Path) -> Iterator[Running]:
    with started(rows) as running:
        yield running


def answered(server: Running, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_gap_is_filled_by_the_marks_of_the_file(server: Running) -> None:
    filled = answered(server, "/infill", {**GAP, "n_predict": 6, "temperature": 0})
    assert filled["content"].startswith("return a + b")
    asked = {"prompt": GAP["input_prefix"], "suffix": GAP["input_suffix"], "max_tokens": 6, "temperature": 0}
    assert server.text(**asked).startswith("return a + b")


def test_a_call_and_its_prompt_are_read_ahead_as_the_template_writes_them(server: Running) -> None:
    asked = {"tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    first = answered(server, CHAT, {"messages": [QUESTION], **asked})
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    until(lambda: server.service.ahead.num_tokens > 0 and server.is_idle())
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
    second = answered(server, CHAT, {"messages": [QUESTION, message, result], **asked, "max_tokens": 4})
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= known - 4


def test_ollamas_path_calls_too(server: Running) -> None:
    body = {"model": "qwen", "messages": [QUESTION], "tools": [WEATHER], "stream": False, "options": {"temperature": 0}}
    (call,) = answered(server, "/api/chat", body)["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}


def test_a_restart_reads_rules_that_two_prompts_shared_from_a_file(server: Running, rows: Path) -> None:
    def usage(running: Running, question: str) -> Any:
        turns = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
        return answered(running, CHAT, {"messages": turns, "max_tokens": 2, "temperature": 0})["usage"]

    for question in ("Is water wet?", "Are cats dogs?"):
        num_rules = usage(server, question)["prompt_tokens_details"]["cached_tokens"]
    assert num_rules > 300
    until(lambda: [*rows.glob("*/*.rows")])
    with started(rows) as again:
        assert usage(again, "Do fish swim?")["prompt_tokens_details"]["cached_tokens"] >= num_rules - 4
