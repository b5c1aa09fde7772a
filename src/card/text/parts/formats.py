"""Formats of answers of families of models, as data; one is chosen by a model's chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from card.text.parts.braced_calls import BracedCalls
from card.text.parts.calls import CallSyntax, JsonCalls, NamedCalls
from card.text.parts.python_calls import PythonCalls
from card.text.parts.tagged_calls import TaggedCalls

Part = Literal["thoughts", "content", "between", "header"]
"""Begun by a mark: `between` is text that belongs to no part, `header` one that names the part behind it."""
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The marks where the parts of an answer begin and end.

    A mark that is an added token of a model counts only as that token, else as its text.
    """

    name: str
    thoughts: tuple[str, str] | None = None  # around what the model thinks, at the beginning of an answer
    wrapper: tuple[str, str] | None = None  # around the content, behind the thoughts
    turns: tuple[tuple[str, Part], ...] = ()  # further marks, and the parts that they begin
    header_end: str | None = None  # behind a header, which names a channel and perhaps a function
    starts_in: Part = "content"
    calls: CallSyntax | None = None
    ends: tuple[str, ...] = ()  # tokens that end an answer where others end a part
    keeps: tuple[str, ...] = ()  # those others

    @property
    def writes_calls(self) -> bool:
        """True if answers can have calls."""
        return self.calls is not None or self.header_end is not None


THINK = ("<think>", "</think>")
HERMES = JsonCalls(marker="<tool_call>", opening="\n", closing="\n</tool_call>", block_joint="\n")
LLAMA3 = JsonCalls(
    marker="<|python_tag|>", opening="", closing="", joint="; ", arguments_key="parameters", is_bare=True
)
MISTRAL = JsonCalls(marker="[TOOL_CALLS]", opening="[", closing="]", joint=", ")
_FUNCTION_TAGS = TaggedCalls(
    marker="<tool_call>",
    head=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    closing="</tool_call>",
    pads="\n",
)
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")

_LISTED = (
    AnswerFormat(name=NONE),
    AnswerFormat(name="think", thoughts=THINK),
    AnswerFormat(name="hermes", thoughts=THINK, calls=HERMES),
    AnswerFormat(name="llama3", thoughts=THINK, calls=LLAMA3),
    AnswerFormat(name="mistral", thoughts=("[THINK]", "[/THINK]"), calls=MISTRAL),
    AnswerFormat(
        name="mistral-args",
        thoughts=("[THINK]", "[/THINK]"),
        calls=NamedCalls(marker="[TOOL_CALLS]", separator="[ARGS]", extra="[CALL_ID]"),
    ),
    AnswerFormat(name="qwen3-coder", thoughts=THINK, calls=_FUNCTION_TAGS),
    AnswerFormat(
        name="seed-oss",
        thoughts=("<seed:think>", "</seed:think>"),
        calls=TaggedCalls(
            marker="<seed:tool_call>",
            head=("<function=", ">"),
            key=("<parameter=", ">"),
            value=("", "</parameter>"),
            end="</function>",
            closing="</seed:tool_call>",
        ),
    ),
    AnswerFormat(
        name="glm4",
        thoughts=THINK,
        calls=TaggedCalls(
            marker="<tool_call>",
            head=("", ""),
            key=("<arg_key>", "</arg_key>"),
            value=("<arg_value>", "</arg_value>"),
            end="</tool_call>",
            closing="</tool_call>",
        ),
    ),
    AnswerFormat(
        name="minimax-m2",
        thoughts=THINK,
        calls=TaggedCalls(
            marker="<minimax:tool_call>",
            head=('<invoke name="', '">'),
            key=('<parameter name="', '">'),
            value=("", "</parameter>"),
            end="</invoke>",
            closing="</minimax:tool_call>",
            has_several=True,
        ),
    ),
    AnswerFormat(
        name="lfm2", thoughts=THINK, calls=PythonCalls(marker="<|tool_call_start|>", closing="<|tool_call_end|>")
    ),
    AnswerFormat(
        name="gemma4",
        thoughts=("<|channel>thought\n", "<channel|>"),
        turns=(("<|channel>thought\n", "thoughts"),),
        calls=BracedCalls(marker="<|tool_call>", head="call:", quote='<|"|>', end="<tool_call|>"),
    ),
    AnswerFormat(
        name="granite3",
        thoughts=THINK,
        wrapper=("<response>", "</response>"),
        calls=JsonCalls(marker="<|tool_call|>", opening="[", closing="]", joint=", "),
    ),
    AnswerFormat(
        name="cohere",
        thoughts=("<|START_THINKING|>", "<|END_THINKING|>"),
        turns=(
            ("<|START_RESPONSE|>", "content"),
            ("<|END_RESPONSE|>", "content"),
            ("<|START_TEXT|>", "content"),
            ("<|END_TEXT|>", "content"),
        ),
        calls=JsonCalls(
            marker="<|START_ACTION|>",
            opening="[",
            closing="]<|END_ACTION|>",
            joint=", ",
            name_key="tool_name",
            arguments_key="parameters",
        ),
    ),
    AnswerFormat(
        name="gpt-oss",
        turns=(
            ("<|start|>", "header"),
            ("<|channel|>", "header"),
            ("<|constrain|>", "header"),
            ("<|end|>", "header"),
            ("<|call|>", "header"),
            ("<|return|>", "header"),
        ),
        header_end="<|message|>",
        starts_in="header",
        ends=("<|return|>", "<|call|>"),
        keeps=("<|end|>",),
    ),
    AnswerFormat(
        name="solar",
        turns=(
            ("<|begin|>", "between"),
            ("<|end|>", "between"),
            ("<|flush|>", "between"),
            ("<|calls|>", "between"),
            ("<|think|>", "thoughts"),
            ("<|content|>", "content"),
            ("<|tool_calls|>", "content"),
        ),
        starts_in="between",
        calls=NamedCalls(
            marker="<|tool_call:begin|>",
            before_name="<|tool_call:name|>",
            separator="<|tool_call:args|>",
            end="<|tool_call:end|>",
        ),
        ends=("<|flush|>", "<|calls|>"),
        keeps=("<|end|>",),
    ),
    AnswerFormat(
        name="kimi-k2",
        thoughts=THINK,
        calls=NamedCalls(
            marker="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>",
            prefix="functions.",
            suffix=r":\d+",
            written_suffix=":{n}",
            separator="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
        ),
    ),
    AnswerFormat(
        name="deepseek-r1",
        thoughts=THINK,
        calls=NamedCalls(
            marker=_DEEPSEEK[0],
            begin=_DEEPSEEK_CALL,
            prefix=f"function{_DEEPSEEK_SEP}",
            separator="\n```json\n",
            end=f"\n```{_DEEPSEEK_END}",
            closing=_DEEPSEEK[1],
        ),
    ),
    AnswerFormat(
        name="deepseek-v3",
        thoughts=THINK,
        calls=NamedCalls(
            marker=_DEEPSEEK[0],
            begin=_DEEPSEEK_CALL,
            separator=_DEEPSEEK_SEP,
            end=_DEEPSEEK_END,
            closing=_DEEPSEEK[1],
        ),
    ),
    AnswerFormat(
        name="nemotron",
        thoughts=THINK,
        calls=JsonCalls(marker="<TOOLCALL>", opening="[", closing="]</TOOLCALL>", joint=", "),
    ),
    AnswerFormat(
        name="apriel",
        thoughts=("<thinking>", "</thinking>"),
        calls=JsonCalls(marker="<tool_calls>", opening="[", closing="]</tool_calls>", joint=", "),
    ),
)
FORMATS = {one.name: one for one in _LISTED}

# What tells a family by its template: all of the first are in it, and none of the second. The first that fits counts.
_SIGNS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("gpt-oss", ("<|channel|>", "<|message|>", "<|start|>"), ()),
    ("solar", ("<|tool_call:begin|>", "<|think|>"), ()),
    ("cohere", ("<|START_ACTION|>",), ()),
    ("kimi-k2", ("<|tool_calls_section_begin|>",), ()),
    ("deepseek-r1", (_DEEPSEEK[0], "```json"), ()),
    ("deepseek-v3", (_DEEPSEEK[0],), ()),
    ("seed-oss", ("<seed:tool_call>",), ()),
    ("minimax-m2", ("<minimax:tool_call>", "<invoke name="), ()),
    ("gemma4", ("<|tool_call>", "call:"), ()),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
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
        token for one in _LISTED if one.ends and all(end in vocabulary for end in one.ends) for token in one.keeps
    )


def _marker(name: str) -> str:
    calls = FORMATS[name].calls
    assert calls is not None
    return calls.marker
