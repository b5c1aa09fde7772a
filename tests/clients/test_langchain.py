"""LangChain against a running server: tools that are bound to a model, structured output, the Responses API."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.clients.running import KEY
from tests.server.running import PROMPT, Command

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

both_apis = pytest.mark.parametrize("use_responses_api", [False, True], ids=["chat", "responses"])


class Animals(BaseModel):
    """What a farmer has."""

    kind: Literal["cows", "sheep"]
    count: int = Field(ge=0, le=99)


def add(a: Literal[1, 2, 3], b: Literal[10, 20]) -> int:
    """Add two numbers."""
    return a + b


def chat(server: Command, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI  # installed for these tests alone, see the Makefile

    url = f"{server.url}/v1"
    return ChatOpenAI(model="demo-target", base_url=url, api_key=KEY, temperature=0, max_retries=0, **options)


@both_apis
@pytest.mark.parametrize("choice", ["add", "required"])
def test_a_bound_tool_is_called_and_its_result_goes_back(server: Command, choice: str, use_responses_api: bool) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    model, adding = chat(server, use_responses_api=use_responses_api), tool(add)
    bound = model.bind_tools([adding], tool_choice=choice, parallel_tool_calls=False)
    history: list[Any] = [HumanMessage(PROMPT)]
    answer = bound.invoke(history)
    (call,) = answer.tool_calls
    assert call["name"] == "add" and not answer.invalid_tool_calls
    result = adding.invoke(call)
    assert int(result.content) == call["args"]["a"] + call["args"]["b"]
    last = model.bind(max_tokens=12).invoke([*history, answer, result])
    assert last.text and not last.tool_calls


@both_apis
def test_a_streamed_call_is_put_together(server: Command, use_responses_api: bool) -> None:
    bound = chat(server, use_responses_api=use_responses_api).bind_tools([add], tool_choice="add")
    pieces = list(bound.stream(PROMPT))
    assert len(pieces) > 3
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    (call,) = whole.tool_calls
    assert call["name"] == "add" and set(call["args"]) == {"a", "b"}


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output_is_an_object_of_its_class(server: Command, method: str) -> None:
    model = chat(server, max_tokens=120).with_structured_output(Animals, method=method)
    assert isinstance(model.invoke(PROMPT), Animals)
