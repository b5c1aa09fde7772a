"""Reading ahead: what the next prompt surely begins with has rows when it comes, and nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from card.config import SamplingParams
from tests.server.running import Running, scraped
from tests.server.scripted import scripted_bytes, served
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

CHAT = "/v1/chat/completions"
SAID = "It is a long answer that will be read again as its thoughts are gone by now"
WORDS = [f"{word} " for word in SAID.split()]
LONG = "".join(WORDS)  # each word a token
SCRIPTS = {
    "plain": ["<think>I see.</think>\n\n", *WORDS],
    "calls": [
        "<think>Go</think>\n",
        '<tool_call>\n{"name": "rm", "arguments": {"p": "some/rather/long/path"}}',
        "\n</tool_call>",
    ],
    "short": ["Yes."],
}
TEMPLATE = """{#- <think> </think> <tool_call> </tool_call> -#}
{%- for tool in tools or [] -%}T{%- endfor -%}
{%- for message in messages -%}
[{{ message.role[0] }}]{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}</tool_call>
{%- endfor -%}
{%- endfor -%}"""
RM: Any = {"type": "function", "function": {"name": "rm", "parameters": {"type": "object"}}}


@pytest.fixture
def thinker() -> Iterator[Running]:
    yield from served(scripted_bytes(SCRIPTS, TEMPLATE), "demo-target")


def asked(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [*turns], "temperature": 0, "max_tokens": 40, **fields}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def num_ahead(server: Running) -> float:
    return scraped(server)["card_prompt_tokens_read_ahead_total", ""]


def cached(answer: dict[str, Any]) -> tuple[int, int]:
    """Return how many tokens of the prompt were read before, and how many there are."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]


def test_the_turn_without_its_thoughts_is_read_before_the_next_one_comes(thinker: Running) -> None:
    first = thinker.post(CHAT, asked(user("plain"))).json()["choices"][0]["message"]
    assert first["content"] == LONG
    until(lambda: num_ahead(thinker) > 0 and thinker.is_idle())
    turns = user("plain"), {"role": "assistant", "content": LONG}, user("short")
    second = thinker.post(CHAT, asked(*turns)).json()
    assert second["choices"][0]["message"]["content"] == "Yes."
    num_cached, num_all = cached(second)
    assert num_all - num_cached <= len("[u]") + 2, "all but the new turn was read"


def test_calls_are_read_as_the_template_writes_them(thinker: Running) -> None:
    answer = thinker.post(CHAT, asked(user("calls"), tools=[RM])).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    until(lambda: num_ahead(thinker) > 0 and thinker.is_idle())
    told = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "short"}
    num_cached, num_all = cached(thinker.post(CHAT, asked(user("calls"), told, result, tools=[RM])).json())
    assert num_all - num_cached <= len("[t]") + 2


def test_a_stream_is_read_behind_too_and_what_is_known_is_not_read_again(thinker: Running) -> None:
    thinker.post(CHAT, asked(user("short")))
    thinker.post(CHAT, asked(user("plain"), stream=True))
    until(lambda: num_ahead(thinker) > 0 and thinker.is_idle())
    assert num_ahead(thinker) == len(WORDS) + len("[a][u]"), "the short answer had nothing worth reading"


def test_it_ends_when_somebody_asks(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, generate = list[bool](), list[bool](), thinker.llm.generate

    async def endless() -> AsyncIterator[Any]:
        begun.append(True)
        try:
            await asyncio.Event().wait()
            yield
        finally:
            ended.append(True)

    def read_for_ever(prompt: Any, params: SamplingParams, **options: Any) -> Any:
        return generate(prompt, params, **options) if params.speculates else endless()

    monkeypatch.setattr(thinker.llm, "generate", read_for_ever)
    thinker.post(CHAT, asked(user("plain")))
    until(lambda: len(begun) == 1)
    assert not ended
    thinker.post(CHAT, asked(user("plain")))
    until(lambda: len(ended) == 1)


def test_an_answer_that_was_cut_off_is_not_read_behind(thinker: Running) -> None:
    thinker.post(CHAT, asked(user("plain"), max_tokens=1))
    thinker.post(CHAT, asked(user("plain"), n=2))
    until(thinker.is_idle)
    assert num_ahead(thinker) == 0
