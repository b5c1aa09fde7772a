"""Ollama's own Python client against a running server: its calls, streamed and not, behind a key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.running import KEY
from tests.clients.test_parts import thinker  # noqa: F401 (a fixture)
from tests.server.running import PROMPT, Command
from tests.server.test_parts import SCHEMA

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

MESSAGES = [{"role": "user", "content": PROMPT}]
SHORT = {"num_predict": 8, "temperature": 0, "num_ctx": 2048}


def client(server: Command, key: str = KEY) -> Any:
    from ollama import Client  # installed for these tests alone, see the Makefile

    return Client(host=server.url, headers={"Authorization": f"Bearer {key}"})


def rm(p: str) -> str:
    """Remove a file.

    Args:
        p: its path.
    """
    return p


def test_it_lists_the_model_and_talks_to_it(server: Command) -> None:
    asking = client(server)
    (name,) = [one.model for one in asking.list().models]
    assert asking.show(name).capabilities == ["completion", "tools"]
    assert [one.model for one in asking.ps().models] == [name]
    answer = asking.chat(name, MESSAGES, options=SHORT)
    assert (answer.model, answer.done, answer.done_reason, answer.eval_count) == (name, True, "length", 8)
    pieces = list(asking.chat(name, MESSAGES, options=SHORT, stream=True))
    assert "".join(one.message.content for one in pieces) == answer.message.content
    assert [one.done for one in pieces] == [False] * (len(pieces) - 1) + [True]
    raw = asking.generate(name, PROMPT, raw=True, options=SHORT).response
    assert "".join(one.response for one in asking.generate(name, PROMPT, raw=True, options=SHORT, stream=True)) == raw


def test_it_reads_thoughts_calls_and_formats(thinker: Command) -> None:  # noqa: F811
    asking, options = client(thinker), {"temperature": 0, "num_predict": 40}
    plain = asking.chat("scripted", [{"role": "user", "content": "plain"}], think=True, options=options).message
    assert (plain.thinking, plain.content) == ("I see.\nReally", "No.\nYes")
    asked = {"role": "user", "content": "calls"}
    called = asking.chat("scripted", [asked], tools=[rm], options=options).message
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("rm", {"p": "a/b"})
    streamed = list(asking.chat("scripted", [asked], tools=[rm], options=options, stream=True))
    (whole,) = [call for one in streamed for call in one.message.tool_calls or ()]
    assert whole.function.arguments == {"p": "a/b"}
    result = {"role": "tool", "tool_name": "rm", "content": "gone"}
    back = asking.chat("scripted", [asked, called, result, {"role": "user", "content": "plain"}], tools=[rm])
    assert back.message.content == "No.\nYes"
    form = asking.chat("scripted", [{"role": "user", "content": "json"}], format=SCHEMA, options=options)
    assert form.message.content == '{"a": 7}'


def test_it_raises_what_the_server_says(server: Command) -> None:
    from ollama import ResponseError

    for call, status, words in (
        (lambda: client(server, "wrong").list(), 401, "API key"),
        (lambda: client(server).embed("demo-target", "x"), 501, "embeddings"),
        (lambda: client(server).show("llama3.2"), 404, "llama3.2"),
        (lambda: client(server).chat("demo-target", MESSAGES, options={"temperature": -1}), 400, "temperature"),
        (lambda: list(client(server).chat("demo-target", MESSAGES, format={"type": "x"}, stream=True)), 400, "format"),
    ):
        with pytest.raises(ResponseError, match=words) as raised:
            call()
        assert raised.value.status_code == status
