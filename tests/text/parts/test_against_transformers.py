"""The parts that transformers' own parsers find, for the formats that it has parsers for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.text.parts.families import find_format
from tests.text.parts.test_answers_of_families import TOOLS, read_behind, template, with_call, written

serving = pytest.importorskip("transformers.cli.serving.utils")
parsing = pytest.importorskip("transformers.utils.chat_parsing")

KINDS = {"Qwen-Qwen3-0.6B": "qwen3", "Qwen3.5-4B": "qwen3_5", "google-gemma-4-31B-it": "gemma4"}
TOLD = [{"type": "function", "function": {"name": "rm", "description": "d", "parameters": TOOLS["rm"]}}]
# No marks within: transformers ends a call at one even where it is in a text.
TEXTS = st.text("ab 1\"'\\\\{}<>&\u00e9\n,:", max_size=12).map(str.strip)


@pytest.mark.parametrize("name", KINDS)
@given(
    thoughts=TEXTS.map("So {}".format),
    content=TEXTS.map(lambda text: f"Yes {text}" if text else ""),
    arguments=st.fixed_dictionaries({"p": TEXTS, "n": st.integers(-9, 9), "b": st.booleans()}),
)
def test_thoughts_content_and_calls_are_those_of_transformers(
    name: str, thoughts: str, content: str, arguments: dict[str, Any]
) -> None:
    form = find_format(template(name), ())
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=KINDS[name]))
    parser = serving.get_response_template(SimpleNamespace(), model)
    assert form is not None and parser is not None
    for answer in (with_call(arguments, thoughts, content), {"role": "assistant", "content": content or "Hi"}):
        prompt, text = written(name, answer)
        text = text.removesuffix("<turn|>")  # ends an answer of Gemma's that is no call
        theirs = parsing.parse_response(text, parser, prefix=prompt, tools=TOLD)
        ours = read_behind(form, prompt, text)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in theirs.get("tool_calls", [])]
        assert [(called, json.loads(made)) for called, made in ours.calls] == calls
        assert ours.thoughts.strip() == theirs.get("reasoning_content", "")
        assert ours.content.strip() == theirs.get("content", "").strip()
