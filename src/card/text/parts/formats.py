"""Formats of answers of families of models, as data, by name."""

from __future__ import annotations

from card.text.parts.answer_format import AnswerFormat, Channels
from card.text.parts.braced_calls import BracedCalls
from card.text.parts.calls import JsonCalls, KeyedCalls, NamedCalls
from card.text.parts.nested_calls import NestedCalls
from card.text.parts.python_calls import PythonCalls
from card.text.parts.tagged_calls import Attributes, TaggedCalls

AUTO, NONE = "auto", "none"

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
DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
_APRIEL = JsonCalls(marker="<tool_calls>", opening="[", closing="]</tool_calls>", joint=", ")

MINIMAX = "]<]minimax[>["
_ROLE_SEP, _MESSAGE_SEP = "<|role_sep|>\n", "<|message_sep|>\n\n"


def _dsml(name: str, block: str) -> AnswerFormat:
    """Return a format of DeepSeek whose tags all have the same mark."""
    mark = "\uff5cDSML\uff5c"
    return AnswerFormat(
        name=name,
        thoughts=THINK,
        calls=TaggedCalls(
            marker=f"<{mark}{block}>",
            head=(f'<{mark}invoke name="', '">'),
            key=(f'<{mark}parameter name="', '"'),
            attributes=Attributes(text=' string="true"', others=(' string="false"',), end=">"),
            value=("", f"</{mark}parameter>"),
            end=f"</{mark}invoke>",
            closing=f"</{mark}{block}>",
            has_several=True,
        ),
    )


def _gigachat(name: str, marker: str) -> AnswerFormat:
    """Return a format of GigaChat, whose marks have the line breaks behind them in their tokens."""
    return AnswerFormat(
        name=name,
        turns=((_MESSAGE_SEP, "content"), (_MESSAGE_SEP.strip(), "content")),
        calls=JsonCalls(marker=marker, opening="", closing=""),
        empty_content=("", _MESSAGE_SEP) if _ROLE_SEP in marker else None,
    )


LISTED = (
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
        channels=Channels(
            thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            content="<|channel|>final<|message|>",
            call_header="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            recipient="to=functions.",
            thoughts_word="analysis",
        ),
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
        channels=Channels(
            thoughts=("<|think|>", "<|end|><|begin|>assistant"), content="<|content|>", calls="<|tool_calls|>"
        ),
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
            marker=DEEPSEEK[0],
            begin=_DEEPSEEK_CALL,
            prefix=f"function{_DEEPSEEK_SEP}",
            separator="\n```json\n",
            end=f"\n```{_DEEPSEEK_END}",
            closing=DEEPSEEK[1],
        ),
    ),
    AnswerFormat(
        name="deepseek-v3",
        thoughts=THINK,
        calls=NamedCalls(
            marker=DEEPSEEK[0],
            begin=_DEEPSEEK_CALL,
            separator=_DEEPSEEK_SEP,
            end=_DEEPSEEK_END,
            closing=DEEPSEEK[1],
        ),
    ),
    AnswerFormat(
        name="nemotron",
        thoughts=THINK,
        calls=JsonCalls(marker="<TOOLCALL>", opening="[", closing="]</TOOLCALL>", joint=", "),
    ),
    AnswerFormat(name="apriel", thoughts=("<thinking>", "</thinking>"), calls=_APRIEL),
    AnswerFormat(
        name="apriel-1.6",
        thoughts=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        turns=(("[END FINAL RESPONSE]", "between"),),
        calls=_APRIEL,
    ),
    AnswerFormat(
        name="minimax-m1",
        thoughts=THINK,
        thinks_unsaid=True,
        calls=JsonCalls(marker="<tool_calls>", opening="\n", closing="\n</tool_calls>", joint="\n"),
    ),
    AnswerFormat(
        name="minimax-m3",
        thoughts=("<mm:think>", "</mm:think>"),
        may_skip=True,
        calls=NestedCalls(
            marker=f"{MINIMAX}<tool_call>",
            mark=MINIMAX,
            head=('<invoke name="', '">'),
            item="item",
            end="</invoke>",
            closing=f"{MINIMAX}</tool_call>",
        ),
    ),
    AnswerFormat(
        name="kimi-k3",
        thoughts=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        thinks_unsaid=True,
        turns=(
            ("<|open|>response<|sep|>", "content"),
            ("<|close|>response<|sep|>", "content"),
            ("<|close|>message<|sep|>", "between"),
        ),
        calls=TaggedCalls(
            marker="<|open|>tools<|sep|>",
            head=('<|open|>call tool="', '"'),
            head_rest=' index="[1-9][0-9]{0,2}"',
            head_end="<|sep|>",
            key=('<|open|>argument key="', '"'),
            attributes=Attributes(
                text=' type="string"',
                others=tuple(f' type="{kind}"' for kind in ("number", "boolean", "object", "array", "null")),
                end="<|sep|>",
            ),
            value=("", "<|close|>argument<|sep|>"),
            whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
            end="<|close|>call<|sep|>",
            closing="<|close|>tools<|sep|>",
            has_several=True,
        ),
        empty_content=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    _gigachat("gigachat3", f"function call{_ROLE_SEP}"),
    _gigachat("gigachat3.1", "<|function_call|>"),
    AnswerFormat(
        name="functionary-v3.1",
        thoughts=THINK,
        calls=NamedCalls(marker="<function=", separator=">", end="</function>"),
    ),
    AnswerFormat(
        name="functionary-v3.2",
        begun=">>>",
        turns=((">>>all\n", "content"),),
        calls=NamedCalls(marker=">>>", separator="\n"),
    ),
    AnswerFormat(
        name="minicpm5",
        thoughts=THINK,
        calls=TaggedCalls(
            marker='<function name="',
            head=("", '">'),
            key=('<param name="', '">'),
            value=("", "</param>"),
            quotes=("<![CDATA[", "]]>"),
            end="</function>",
            closing="</function>",
        ),
    ),
    AnswerFormat(
        name="apertus",
        thoughts=("<|inner_prefix|>", "<|inner_suffix|>"),
        calls=KeyedCalls(marker="<|tools_prefix|>", closing="<|tools_suffix|>"),
        calls_end_thoughts=True,
    ),
    AnswerFormat(
        name="hunyuan3",
        thoughts=("<think:opensource>", "</think:opensource>"),
        thinks_unsaid=True,
        no_effort="no_think",
        calls=TaggedCalls(
            marker="<tool_calls:opensource>",
            head=("<tool_call:opensource>", "<tool_sep:opensource>"),
            key=("<arg_key:opensource>", "</arg_key:opensource>"),
            value=("<arg_value:opensource>", "</arg_value:opensource>"),
            end="</tool_call:opensource>",
            closing="</tool_calls:opensource>",
            has_several=True,
        ),
    ),
    AnswerFormat(
        name="muse",
        turns=(("<|start|>", "header"), ("<|eom|>", "header"), ("<|eot|>", "header")),
        header_end="<|message|>",
        starts_in="header",
        channels=Channels(
            thoughts=(" to=self<|message|>", "<|eom|><|start|>assistant"),
            content=" to=user<|message|>",
            call_header=" to={name}<|message|>",
            joint="<|eom|><|start|>assistant",
            recipient="to=",
            thoughts_word="to=self",
        ),
        calls=TaggedCalls(
            marker="<atem:function_calls>",
            head=('<atem:invoke name="', '">'),
            key=('<atem:parameter name="', '">'),
            value=("", "</atem:parameter>"),
            end="</atem:invoke>",
            closing="</atem:function_calls>",
        ),
        ends=("<|eot|>", "<|message|>"),
        keeps=("<|eom|>",),
    ),
)
FORMATS = {one.name: one for one in LISTED}
