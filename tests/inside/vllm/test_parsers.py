"""Thoughts and calls of each format are those that vLLM's own parsers find in the same text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from card.text.parts.formats import FORMATS
from tests.server.test_part_grammars import WRITTEN
from tests.text.parts.reading import read
from tests.text.parts.test_answers_of_families import TOOLS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# vLLM's parsers of calls and of thoughts, by format. Left out are Granite's and DeepSeek V3's of thoughts: the one
# looks for sentences of an older model, the other asks whether the request wanted thoughts. Left out whole: Hy3's looks
# for tokens of another vocabulary, Command's reads token ids only.
PARSERS: dict[str, tuple[str, str | None]] = {
    "hermes": ("hermes", "qwen3"),
    "qwen3-coder": ("qwen3_coder", None),
    "minimax-m2": ("minimax_m2", "minimax_m2"),
    "minimax-m3": ("minimax_m3", "minimax_m3"),
    "mistral": ("mistral", "mistral"),
    "gemma4": ("gemma4", "gemma4"),
    "seed-oss": ("seed_oss", "seed_oss"),
    "glm4": ("glm45", "glm45"),
    "granite3": ("granite", None),
    "kimi-k2": ("kimi_k2", "kimi_k2"),
    "deepseek-v3": ("deepseek_v31", None),
    "deepseek-v4": ("deepseek_v4", "deepseek_v4"),
    "kimi-k3": ("kimi_k3", "kimi_k3"),
    "deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "gigachat3": ("gigachat3", None),
    "gigachat3.1": ("gigachat3", None),
    "apertus": ("apertus", None),
    "minicpm5": ("minicpm5", None),
    "muse": ("muse_glimmer", "muse_glimmer"),
    "lfm2": ("lfm2", None),
}


def tokenizer_of(name: str) -> Any:
    """Return a tokenizer that has the marks of a format as tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks_of(name)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def marks_of(name: str) -> list[str]:
    """Return the marks of a format that may be tokens."""
    found: list[str] = []
    form = FORMATS[name]
    for mark in (*(form.thoughts or ()), *(mark for mark, _ in form.turns), *_texts(form.calls)):
        if mark.strip() and mark[:1] in "<[]\uff5c" and mark not in found:
            found.append(mark)
    return found


def _texts(calls: Any) -> list[str]:
    names = ("marker", "closing", "begin", "separator", "end", "before_name", "quote", "mark")
    return [getattr(calls, name, "") for name in names] if calls is not None else []


def parsed(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the thoughts and the calls that vLLM's parsers find."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    of_calls, of_thoughts = PARSERS[name]
    tokenizer = tokenizer_of(name)
    functions = [{"type": "function", "function": {"name": one, "parameters": TOOLS[one]}} for one in TOOLS]
    asked = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": functions}
    )
    thoughts, rest = "", text
    if of_thoughts is not None:
        found, left = ReasoningParserManager.get_reasoning_parser(of_thoughts)(tokenizer).extract_reasoning(text, asked)
        thoughts, rest = found or "", left or ""
    calls = ToolParserManager.get_tool_parser(of_calls)(tokenizer, asked.tools).extract_tool_calls(rest, asked)
    return thoughts, [(one.function.name, json.loads(one.function.arguments)) for one in calls.tool_calls]


@pytest.mark.parametrize("name", PARSERS)
def test_thoughts_and_calls_are_those_of_vllm(name: str) -> None:
    thoughts, call = WRITTEN[name]
    text = (thoughts if PARSERS[name][1] is not None else "") + call
    ours = read(FORMATS[name], [text], TOOLS)
    found, calls = parsed(name, text)
    assert [(called, json.loads(given)) for called, given in ours.calls] == calls != []
    assert ours.thoughts.strip() == found.strip()
