"""Thoughts, channels and calls through LangChain, LiteLLM and OpenAI's client, on tiny models that write them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, create_model

from tests.clients.running import FOLDER, KEY, run_client
from tests.server.running import Command, command
from tests.server.scripted import scripted_bytes
from tests.server.test_parts import (
    CALL,
    CHANNEL_MARKS,
    CHANNEL_TEMPLATE,
    CHANNELS,
    FINAL,
    THINKING,
    THINKING_TEMPLATE,
)

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

PYTHON = FOLDER.parents[1] / ".venv-litellm" / "bin" / "python"
THOUGHTS = {"thinker": ("I see.\nReally", "Go"), "channels": ("The user says hi.", "Hm")}
CONTENT = {"thinker": "No.\nYes", "channels": "Hello!"}
ARGUMENTS = {"thinker": {"p": "a/b"}, "channels": {"p": "x"}}
held = pytest.mark.parametrize("served", ["thinker", "final"])
both = pytest.mark.parametrize("served", ["thinker", "channels"])


class A(BaseModel):
    """An answer."""

    a: int


class Rm(BaseModel):
    """What is removed."""

    p: str


def rm(p: str) -> str:
    """Remove a file."""
    return p


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    yield from _served(tmp_path_factory.mktemp("thinker"), THINKING, THINKING_TEMPLATE)


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    yield from _served(tmp_path_factory.mktemp("channels"), CHANNELS, CHANNEL_TEMPLATE)


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    yield from _served(tmp_path_factory.mktemp("final"), FINAL, CHANNEL_TEMPLATE, CHANNEL_MARKS)


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    yield from _served(tmp_path_factory.mktemp("called"), CALL, CHANNEL_TEMPLATE, CHANNEL_MARKS)


def _served(
    folder: Path, scripts: dict[str, list[str]], template: str, special: tuple[str, ...] = ()
) -> Iterator[Command]:
    model = scripted_bytes(scripts, template, special)
    model.model.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    options = (str(folder / "model"), "--dtype", "float32", "--method", "vanilla", "--served-model-name", "scripted")
    with command(folder, *options, env={"CARD_API_KEY": KEY}) as running:
        yield running


def chat(server: Command) -> Any:
    from langchain_openai import ChatOpenAI  # installed for these tests alone, see the Makefile

    url = f"{server.url}/v1"
    return ChatOpenAI(model="scripted", base_url=url, api_key=KEY, temperature=0, max_retries=0, max_tokens=40)


@both
def test_langchain_binds_tools(served: str, request: pytest.FixtureRequest) -> None:
    bound = chat(request.getfixturevalue(served)).bind_tools([rm])
    answer = bound.invoke("calls")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("rm", ARGUMENTS[served]) and not answer.content
    pieces = list(bound.stream("calls"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.tool_calls[0]["args"] == ARGUMENTS[served]
    assert chat(request.getfixturevalue(served)).invoke("plain").content == CONTENT[served]


@held
def test_langchain_has_structured_output_in_the_content(served: str, request: pytest.FixtureRequest) -> None:
    model = chat(request.getfixturevalue(served)).with_structured_output(A, method="json_schema")
    assert model.invoke("json") == A(a=7)


@pytest.mark.parametrize(("served", "argument"), [("thinker", "a/b"), ("called", "x")])
def test_langchain_has_structured_output_as_a_call(served: str, argument: str, request: pytest.FixtureRequest) -> None:
    removed: Any = create_model("rm", p=(Literal[argument], ...))  # type: ignore[valid-type]
    model = chat(request.getfixturevalue(served)).with_structured_output(removed, method="function_calling")
    assert model.invoke("calls").model_dump() == {"p": argument}


def openais(server: Command) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@held
def test_openais_client_parses_the_content(served: str, request: pytest.FixtureRequest) -> None:
    asked: Any = {"model": "scripted", "messages": [{"role": "user", "content": "json"}], "max_tokens": 40}
    with openais(request.getfixturevalue(served)) as client:
        answer = client.chat.completions.parse(response_format=A, temperature=0, **asked)
    assert answer.choices[0].message.parsed == A(a=7)


@both
def test_openais_client_streams_calls_behind_thoughts(served: str, request: pytest.FixtureRequest) -> None:
    tools: Any = [{"type": "function", "function": {"name": "rm", "parameters": Rm.model_json_schema()}}]
    asked: Any = {"model": "scripted", "messages": [{"role": "user", "content": "calls"}], "max_tokens": 40}
    with (
        openais(request.getfixturevalue(served)) as client,
        client.chat.completions.stream(tools=tools, temperature=0, **asked) as stream,
    ):
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert Rm.model_validate_json(call.function.arguments) == Rm(**ARGUMENTS[served])
    assert kinds.count("tool_calls.function.arguments.delta") > 1, "the arguments come as they are written"


@both
def test_litellm_reads_thoughts_content_and_calls(served: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert PYTHON.is_file(), "LiteLLM is not installed; run make test-clients"
    server: Command = request.getfixturevalue(served)
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    script = str(FOLDER / "litellm" / "read_parts.py")
    told = json.loads(run_client(str(PYTHON), script, server.url, KEY, folder=tmp_path, env=offline).splitlines()[-1])
    of_plain, of_calls = THOUGHTS[served]
    for script in ("plain", "plain streamed"):
        assert told[script] == [of_plain, CONTENT[served], []]
    for script in ("calls", "calls streamed"):
        thoughts, content, calls = told[script]
        assert (thoughts, content or None, calls) == (of_calls, None, [["rm", ARGUMENTS[served]]])
