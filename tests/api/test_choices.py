"""Several answers to a prompt, tools and variables of a chat template, and what a result says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from card import LLM, AsyncLLM, SamplingParams
from card.config.sampling import derived_seed
from card.errors import PromptError, SettingsError

QUICK: dict[str, Any] = {"cache": False, "check": False, "policy": "fixed"}
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**QUICK) as llm:
        yield llm


def test_several_answers_are_those_of_their_own_seeds(llm: LLM) -> None:
    several, alone = llm.generate(["hello", "one two"], [SAMPLED.replace(n=3), SAMPLED])
    assert [one.index for one in several.outputs] == [0, 1, 2] and len(alone.outputs) == 1
    for idx, one in enumerate(several.outputs):
        seeded = SAMPLED.replace(seed=derived_seed(5, idx))
        assert llm.generate("hello", seeded)[0].outputs[0].token_ids == one.token_ids
    assert len({one.token_ids for one in several.outputs}) > 1
    assert several.stats.num_new_tokens == 18 and alone.stats.num_new_tokens == 6


def test_a_stream_has_one_answer(llm: LLM) -> None:
    async def ask() -> None:
        async with AsyncLLM(**QUICK) as other:
            with pytest.raises(SettingsError, match="n must be 1 for a stream"):
                other.generate("hello", SAMPLED.replace(n=2))

    with pytest.raises(SettingsError, match="n must be 1 for a stream"):
        llm.stream("hello", SAMPLED.replace(n=2))
    asyncio.run(ask())


TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}: {% endif %}{{ messages[0].content }}"
    "{% if enable_thinking is defined and enable_thinking %} think{% endif %}"
)


def test_a_template_tells_tools_and_variables(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", TEMPLATE)
    few = SamplingParams(max_tokens=1)

    def told(**how: Any) -> str:
        (result,) = llm.chat(ASKED, few, **how)
        return llm.tokenizer.decode(result.prompt_token_ids)

    assert told() == "What is 2 + 2?"
    assert told(tools=[ADD]) == "add: What is 2 + 2?"
    assert told(tools=[ADD], chat_template_kwargs={"enable_thinking": True}) == "add: What is 2 + 2? think"
    chunks = list(llm.stream(ASKED, few, chat_template_kwargs={"enable_thinking": True}))
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"tools": "add"}, "tools must be a list of functions in OpenAI's shape, got 'add'"),
        ({"tools": [3]}, "tools must be a list of functions"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be a mapping"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must be a mapping of variables other than"),
    ],
)
def test_what_is_no_tool_and_no_variable_is_refused(llm: LLM, how: dict[str, Any], said: str) -> None:
    for ask in (llm.chat, llm.stream):
        with pytest.raises(PromptError, match=said):
            ask(ASKED, SAMPLED, **how)


def test_tools_are_for_conversations(llm: LLM) -> None:
    with pytest.raises(PromptError, match="a conversation must be a list of messages"):
        llm.stream("hello", SAMPLED, tools=[ADD])
