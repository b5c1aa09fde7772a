"""A model's family, told by its chat template and vocabulary: it gives the format of answers."""

from __future__ import annotations

from collections.abc import Collection

from card.text.parts.answer_format import AnswerFormat
from card.text.parts.formats import DEEPSEEK, FORMATS, LISTED, MINIMAX, THINK

# What tells a family by its template: all of the first are in it, and none of the second. The first that fits counts.
_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpt-oss", ("<|channel|>", "<|message|>", "<|start|>"), ()),
    ("muse", ("<atem:invoke", "<|message|>"), ()),
    ("kimi-k3", ("<|open|>", "<|close|>", "'tools'"), ()),
    ("solar", ("<|tool_call:begin|>", "<|think|>"), ()),
    ("cohere", ("<|START_ACTION|>",), ()),
    ("kimi-k2", ("<|tool_calls_section_begin|>",), ()),
    ("deepseek-r1", (DEEPSEEK[0], "```json"), ()),
    ("deepseek-v3", (DEEPSEEK[0],), ()),
    ("deepseek-v3.2", ("\uff5cDSML\uff5c", "function_calls>"), ()),
    ("deepseek-v4", ("\uff5cDSML\uff5c", "tool_calls>"), ()),
    ("gigachat3.1", ("<|role_sep|>", "<|function_call|>"), ()),
    ("gigachat3", ("<|role_sep|>", "function call"), ()),
    ("apertus", ("<|tools_prefix|>", "<|inner_prefix|>"), ()),
    ("hunyuan3", ("<tool_sep{}>", ":opensource"), ()),
    ("minimax-m3", (MINIMAX, "<invoke name="), ()),
    ("minimax-m1", ("<tool_calls>", "<beginning_of_sentence>ai"), ()),
    ("minicpm5", ("<function name=", "<param name="), ()),
    ("functionary-v3.2", (">>>all\\n", "recipient"), ()),
    ("functionary-v3.1", ("<function=", "</function>"), ("<tool_call>", "<parameter=", ":tool_call>")),
    ("seed-oss", ("<seed:tool_call>",), ()),
    ("minimax-m2", ("<minimax:tool_call>", "<invoke name="), ()),
    ("gemma4", ("<|tool_call>", "call:"), ()),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("apriel-1.6", ("<tool_calls>", "'Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), ()),
    ("apriel", ("<tool_calls>", "<thinking>"), ()),
    ("qwen3-coder", ("<tool_call>", "<function="), ()),
    ("glm4", ("<tool_call>", "<arg_key>"), ()),
    ("hermes", ("<tool_call>",), ("<function=", "<function name", "<invoke")),
    ("granite3", ("<|tool_call|>", "<response>"), ()),
    ("lfm2", ("List of tools: ",), ()),
    ("lfm2", ("<|tool_call_start|>",), ()),
    ("nemotron", ("<TOOLCALL>",), ()),
    (
        "llama3",
        ('"parameters":', '"name":'),
        ("<function=", "<function name", "invoke", "<tool_call>", "<|function_call|>"),
    ),
)


def find_format(template: str, vocabulary: Collection[str]) -> AnswerFormat | None:
    """Return a model's format; None if its template has tools, or channels, that nothing here knows.

    Args:
        template: the chat template with tools.
        vocabulary: the tokenizer's tokens.
    """
    for name, present, absent in _SIGNS:
        if all(sign in template for sign in present) and not any(sign in template for sign in absent):
            return FORMATS[name]
    if has_tools(template):
        return FORMATS["think"] if THINK[1] in template else None
    return FORMATS[next((name for name in ("mistral", "llama3") if _marker(name) in vocabulary), "hermes")]


def has_tools(template: str) -> bool:
    """Return whether a chat template describes tools to the model."""
    return "tools" in template


def kept_ends(vocabulary: Collection[str]) -> frozenset[str]:
    """Return the tokens that end a part of an answer, and not the answer, by the tokens of a model."""
    return frozenset(
        token for one in LISTED if one.ends and all(end in vocabulary for end in one.ends) for token in one.keeps
    )


def _marker(name: str) -> str:
    calls = FORMATS[name].calls
    assert calls is not None
    return calls.marker
