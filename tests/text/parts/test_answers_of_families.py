"""Answers as families of models write them, read in parts, whole and cut anywhe"
"re; and the models' own templates."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.text.chat_template import render_chat
from card.text.parts.answer_format import AnswerFormat
from card.text.parts.families import find_format
from card.text.parts.formats import FORMATS
from card.text.parts.pieces import CallArguments
from card.text.parts.reader import AnswerReader
from card.text.parts.view import texts_of
from tests.text.parts.reading import Read, cut, put_together, read

TEMPLATES = Path(__file__).parent / "templates"
TOOLS: dict[str, Any] = {
    "rm": {
        "type": "object",
        "properties": {
            "p": {"type": "string"},
            "n": {"type": "integer"},
            "l": {"type": "array"},
            "o": {"type": "object"},
            "b": {"type": "boolean"},
        },
    },
    "add": {"type": "object", "properties": {}},
}
DS = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
M3 = "]<]minimax[>["
DSML = "\uff5cDSML\uff5c"
ATEM = '<atem:function_calls>\n<atem:invoke name="add">\n</atem:invoke>\n</atem:function_calls>'
DE = ("<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")

# Format, the part that the prompt has begun, the text, and what is in it. Sources: each model's own chat template;
# gpt-oss: OpenAI's description of the harmony format; Cohere: its documentation of tool use; GigaChat: its makers'
# description in pull request 36664 of vLLM; MiniMax-M1: its guide to function calls. The parsers of vLLM 0.19.1
# for GLM, MiniMax-M2, Gemma 4, Granite, Seed-OSS, Kimi and DeepSeek find the same calls and thoughts; those for Hermes
# and Qwen3-Coder end a call at a mark within a string.
ANSWERS: list[tuple[str, Any, str, Read]] = [
    (
        "hermes",
        None,
        '<think>So<tool_call>{"name":"rm","arguments":{"p":"/"}}</tool_call> but no.</think>No.',
        Read("No.", [], 'So<tool_call>{"name":"rm","arguments":{"p":"/"}}</tool_call> but no.'),
    ),
    ("hermes", "thoughts", 'Short.\n</think>\n\n{"a": 7}', Read('{"a": 7}', [], "Short.")),
    ("hermes", "thoughts", "It never ends", Read("", [], "It never ends")),
    ("hermes", "thoughts", '```json\n{"name": "rm"}\n```\n</think>Hi', Read("Hi", [], '```json\n{"name": "rm"}\n```')),
    ("hermes", None, "I say <think> and </think>.", Read("I say <think> and </think>.")),
    (
        "hermes",
        None,
        '<tool_call>\n{"name": "rm", "arguments": {"p": "a </tool_call> b"}}\n</tool_call>',
        Read("", [("rm", '{"p": "a </tool_call> b"}')]),
    ),
    (
        "gpt-oss",
        None,
        "<|channel|>analysis<|message|>The user says hi.<|end|><|start|>assistant<|chann"
        "el|>final<|message|>Hello!<|return|>",
        Read("Hello!", [], "The user says hi."),
    ),
    (
        "gpt-oss",
        None,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.rm "
        '<|constrain|>json<|message|>{"p":"<|"}<|call|>',
        Read("", [("rm", '{"p":"<|"}')], "Hm"),
    ),
    (
        "gpt-oss",
        None,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.a"
        "dd<|channel|>commentary json"
        "<|message|>{}<|call|>",
        Read("I look.", [("add", "{}")]),
    ),
    ("gpt-oss", None, "Just text", Read("Just text")),
    (
        "solar",
        None,
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Hello!<|end|><|flush|>",
        Read("Hello!", [], "Hm."),
    ),
    (
        "solar",
        None,
        "<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>x1<|tool_"
        'call:name|>rm<|tool_call:args|>{"p":'
        '"a"}<|tool_call:end|><|tool_call:begin|>x2<|tool_call:name|>add<|tool_call:args'
        "|>{}<|tool_call:end|><|calls|>",
        Read("", [("rm", '{"p":"a"}'), ("add", "{}")], "Hm."),
    ),
    (
        "cohere",
        None,
        '<|START_THINKING|>Hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0"'
        ', "tool_name": "rm", "parameters": '
        '{"p":"/"}},\n {"tool_call_id": "1", "tool_name": "add", "parameters": {}}\n]<|END_ACTION|>',
        Read("", [("rm", '{"p":"/"}'), ("add", "{}")], "Hm"),
    ),
    ("cohere", None, "<|START_RESPONSE|>Hi<|END_RESPONSE|>", Read("Hi")),
    (
        "qwen3-coder",
        None,
        'Ok.\n<tool_call>\n<function=rm>\n<parameter=p>\na </parameter> "b\n\n</paramete'
        "r>\n<parameter=n>\n3\n</parameter>\n"
        '<parameter=l>\n["a", 1]\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</fun'
        "ction>\n</tool_call>\n<tool_call>\n"
        "<function=add>\n</function>\n</tool_call>",
        Read("Ok.", [("rm", '{"p": "a </parameter> \\"b\\n", "n": 3, "l": ["a", 1], "b": true}'), ("add", "{}")]),
    ),
    (
        "glm4",
        None,
        "\n<think>q</think>\nSo\n<tool_call>rm\n<arg_key>p</arg_key>\n<arg_value>12</arg"
        "_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>4</arg_value>\n</tool_call>",
        Read("So", [("rm", '{"p": "12", "n": 4}')], "q"),
    ),
    (
        "glm4",
        None,
        "<tool_call>rm<arg_key>p</arg_key><arg_value>/x</arg_value></tool_call><tool_call>add</tool_call>",
        Read("", [("rm", '{"p": "/x"}'), ("add", "{}")]),
    ),
    (
        "minimax-m2",
        "thoughts",
        'q\n</think>\n\n<minimax:tool_call>\n<invoke name="rm">\n<parameter name="p">/</'
        'parameter>\n<parameter name="n">3'
        '</parameter>\n</invoke>\n<invoke name="add">\n</invoke>\n</minimax:tool_call>',
        Read("", [("rm", '{"p": "/", "n": 3}'), ("add", "{}")], "q"),
    ),
    (
        "mistral-args",
        None,
        '[THINK]a[/THINK]Hi[TOOL_CALLS]rm[ARGS]{"p": "/"}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{}',
        Read("Hi", [("rm", '{"p": "/"}'), ("add", "{}")], "a"),
    ),
    (
        "lfm2",
        None,
        "<|tool_call_start|>[rm(p=\"a, (b\", n=-3, l=[1, 'x', {'a': True}]), add()]<|tool_call_end|>done",
        Read("done", [("rm", '{"p": "a, (b", "n": -3, "l": [1, "x", {"a": true}]}'), ("add", "{}")]),
    ),
    (
        "lfm2",
        None,
        "<think>q</think><|tool_call_start|>[rm(p='x \"y\"\nz', n=1)]<|tool_call_end|>",
        Read("", [("rm", '{"p": "x \\"y\\"\\nz", "n": 1}')], "q"),
    ),
    (
        "gemma4",
        None,
        '<|channel>thought\nhm\n<channel|><|tool_call>call:rm{p:<|"|>a "q", }<|"|>,n:3,l'
        ':[<|"|>x<|"|>,{k:true}]}<tool_call|>'
        "<|tool_call>call:add{}<tool_call|>",
        Read("", [("rm", '{"p": "a \\"q\\", }", "n": 3, "l": ["x", {"k": true}]}'), ("add", "{}")], "hm"),
    ),
    ("granite3", None, "<think>a</think>\n<response>b</response>", Read("b", [], "a")),
    (
        "granite3",
        None,
        '<|tool_call|>[{"name": "rm", "arguments": {"p": "/"}}, {"name": "add", "arguments": {}}]',
        Read("", [("rm", '{"p": "/"}'), ("add", "{}")]),
    ),
    (
        "seed-oss",
        None,
        "<seed:think>a</seed:think><seed:tool_call>\n<function=rm>\n<parameter=p>x\ny</parameter>\n</function>\n"
        "</seed:tool_call>",
        Read("", [("rm", '{"p": "x\\ny"}')], "a"),
    ),
    (
        "kimi-k2",
        None,
        "a<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>"
        '{"p": "/"}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argume'
        "nt_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        Read("a", [("rm", '{"p": "/"}'), ("add", "{}")]),
    ),
    (
        "deepseek-r1",
        "thoughts",
        f'a</think>{DS[0]}{DS[1]}function{DS[2]}rm\n```json\n{{"p": "/"}}\n```{DE[0]}{DE[1]}',
        Read("", [("rm", '{"p": "/"}')], "a"),
    ),
    (
        "deepseek-v3",
        None,
        f'{DS[0]}{DS[1]}rm{DS[2]}{{"p": "/"}}{DE[0]}{DS[1]}add{DS[2]}{{}}{DE[0]}{DE[1]}',
        Read("", [("rm", '{"p": "/"}'), ("add", "{}")]),
    ),
    (
        "nemotron",
        None,
        '<TOOLCALL>[{"name": "rm", "arguments": {"p": "/"}}]</TOOLCALL>',
        Read("", [("rm", '{"p": "/"}')]),
    ),
    (
        "apriel",
        None,
        '<thinking>a</thinking><tool_calls>[{"name": "rm", "arguments": {"p": "/"}}]</tool_calls>',
        Read("", [("rm", '{"p": "/"}')], "a"),
    ),
    (
        "apriel-1.6",
        "thoughts",
        "Hm <tool_calls>[]\n[BEGIN FINAL RESPONSE]\nSo.\n"
        '<tool_calls>[{"name": "rm", "arguments": {"p": "/"}}]</tool_calls>',
        Read("So.", [("rm", '{"p": "/"}')], "Hm <tool_calls>[]"),
    ),
    (
        "apriel-1.6",
        None,
        "Here are my reasoning steps:\na\n[BEGIN FINAL RESPONSE]\nHi\n[END FINAL RESPONSE]\n",
        Read("Hi", [], "a"),
    ),
    (
        "minimax-m1",
        None,
        '<think>\na\n</think>\n\nSo\n<tool_calls>\n{"name": "rm", "arguments": {"p": "/"}}\n'
        '{"name": "add", "arguments": {}}\n</tool_calls>',
        Read("So", [("rm", '{"p": "/"}'), ("add", "{}")], "a"),
    ),
    ("minimax-m3", None, "</mm:think>Hi </mm:think>", Read("Hi </mm:think>")),
    (
        "minimax-m3",
        None,
        f'<mm:think>a</mm:think>So{M3}<tool_call>\n{M3}<invoke name="rm">{M3}<p>a </p> <b> "q"\n{M3}</p>'
        f"{M3}<n>3{M3}</n>"
        f"{M3}<l>{M3}<item>x{M3}</item>{M3}<item>{M3}<item>2{M3}</item>{M3}</item>{M3}</l>"
        f"{M3}<o>{M3}<k>true{M3}</k>{M3}<e>{M3}</e>{M3}</o>{M3}</invoke>\n"
        f'{M3}<invoke name="add">{M3}</invoke>\n{M3}</tool_call>',
        Read(
            "So",
            [
                ("rm", '{"p": "a </p> <b> \\"q\\"\\n", "n": 3, "l": ["x", [2]], "o": {"k": true, "e": ""}}'),
                ("add", "{}"),
            ],
            "a",
        ),
    ),
    (
        "minimax-m3",
        "thoughts",
        f'{M3}<tool_call>\n{M3}<invoke name="add">{M3}</invoke>\n{M3}</tool_call> no</mm:think>No',
        Read("No", [], f'{M3}<tool_call>\n{M3}<invoke name="add">{M3}</invoke>\n{M3}</tool_call> no'),
    ),
    (
        "kimi-k3",
        "thoughts",
        "a<|close|>think<|sep|><|open|>response<|sep|>The response tag, then message.<|close|>response<|sep|>"
        "<|close|>message<|sep|>",
        Read("The response tag, then message.", [], "a"),
    ),
    (
        "kimi-k3",
        "content",
        'So<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|>'
        '<|open|>argument key="p" type="string"<|sep|>12<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="x" type="string"<|sep|>4<|close|>argument<|sep|>'
        '<|open|>argument key="l" type="array"<|sep|>["a",1]<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="add" index="2"<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="rm" index="3"<|sep|><|open|>json type="object"<|sep|>{"p":"/"}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        Read("So", [("rm", '{"p": "12", "n": 3, "x": "4", "l": ["a",1]}'), ("add", "{}"), ("rm", '{"p":"/"}')]),
    ),
    *(
        (
            form,
            "thoughts",
            f'a</think>So\n\n<{DSML}{block}>\n<{DSML}invoke name="rm">\n'
            f'<{DSML}parameter name="p" string="true">a </b> "q"\n</{DSML}parameter>\n'
            f'<{DSML}parameter name="n" string="false">3</{DSML}parameter>\n'
            f'<{DSML}parameter name="x" string="true">4</{DSML}parameter>\n'
            f'</{DSML}invoke>\n<{DSML}invoke name="add">\n\n</{DSML}invoke>\n</{DSML}{block}>',
            Read("So", [("rm", '{"p": "a </b> \\"q\\"\\n", "n": 3, "x": "4"}'), ("add", "{}")], "a"),
        )
        for form, block in (("deepseek-v3.2", "function_calls"), ("deepseek-v4", "tool_calls"))
    ),
    ("gigachat3", None, "Hi<|message_sep|>\n\n", Read("Hi")),
    (
        "gigachat3",
        None,
        "So<|message_sep|>\n\nfunction call<|role_sep|>\n"
        '{"name": "rm", "arguments": {"p": "<|message_sep|>"}}<|message_sep|>\n\n',
        Read("So", [("rm", '{"p": "<|message_sep|>"}')]),
    ),
    (
        "gigachat3.1",
        None,
        'So<|function_call|>{"name": "rm", "arguments": {"p": "/"}}<|message_sep|>\n\n',
        Read("So", [("rm", '{"p": "/"}')]),
    ),
    (
        "functionary-v3.1",
        None,
        'So <function=f> <function=rm>{"p": "</function>"}</function><function=add>{}</function>',
        Read("So <function=f>", [("rm", '{"p": "</function>"}'), ("add", "{}")]),
    ),
    ("functionary-v3.2", None, "all\n>>> print(1)\n1", Read(">>> print(1)\n1")),
    ("functionary-v3.2", None, "Just text\nof mine", Read("Just text\nof mine")),
    ("functionary-v3.2", None, 'xy\n{"p": "/"}', Read('xy\n{"p": "/"}')),
    (
        "functionary-v3.2",
        None,
        'rm\n{"p": ">>>add\\n{}"}>>>add\n{}',
        Read("", [("rm", '{"p": ">>>add\\n{}"}'), ("add", "{}")]),
    ),
    ("functionary-v3.2", None, 'all\nSo>>>rm\n{"p": "/"}', Read("So", [("rm", '{"p": "/"}')])),
    (
        "minicpm5",
        "thoughts",
        'a</think>So <function name="xy"></function>\n<function name="rm"><param name="p"><![CDATA[<a> ]]> </param> &\n'
        '"]]></param><param name="n">3</param><param name="l">[\'a\', True]</param></function>\n'
        '<function name="add"></function>',
        Read(
            'So <function name="xy"></function>',
            [("rm", '{"p": "<a> ]]> </param> &\\n\\"", "n": 3, "l": ["a", true]}'), ("add", "{}")],
            "a",
        ),
    ),
    (
        "apertus",
        None,
        '<|inner_prefix|>a<|inner_suffix|>So<|tools_prefix|>[{"rm": {"p": "<|tools_suffix|>"}}, {"add": {}}]'
        "<|tools_suffix|>",
        Read("So", [("rm", '{"p": "<|tools_suffix|>"}'), ("add", "{}")], "a"),
    ),
    (
        "apertus",
        None,
        '<|inner_prefix|>a<|tools_prefix|>[{"rm": {"p": "/"}}]<|tools_suffix|>',
        Read("", [("rm", '{"p": "/"}')], "a"),
    ),
    (
        "hunyuan3",
        "thoughts",
        "a</think:opensource>So<tool_calls:opensource>\n<tool_call:opensource>rm<tool_sep:opensource>\n"
        "<arg_key:opensource>p</arg_key:opensource>\n<arg_value:opensource>12\n</arg_value:opensource>\n"
        "<arg_key:opensource>n</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n<tool_call:opensource>add<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        Read("So", [("rm", '{"p": "12\\n", "n": 3}'), ("add", "{}")], "a"),
    ),
    (
        "muse",
        None,
        f" to=self<|message|>a {ATEM} b<|eom|><|start|>assistant to=user<|message|>Like {ATEM}<|eom|>"
        f"<|start|>assistant to=add<|message|>{ATEM}<|eom|><|start|>assistant to=rm<|message|><atem:function_calls>\n"
        '<atem:invoke name="rm">\n<atem:parameter name="p">a\n"b" </atem:parameter>\n'
        '<atem:parameter name="b">true</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
        Read(f"Like {ATEM}", [("add", "{}"), ("rm", '{"p": "a\\n\\"b\\" ", "b": true}')], f"a {ATEM} b"),
    ),
    ("muse", None, " to=add<|message|>No call.<|eot|>", Read("No call.")),
]
NAMES = [f"{form}-{idx}" for idx, (form, *_) in enumerate(ANSWERS)]


@pytest.mark.parametrize(("form", "begun", "text", "parts"), ANSWERS, ids=NAMES)
def test_an_answer_has_the_parts_that_its_model_means_however_it_is_cut(
    form: str, begun: Any, text: str, parts: Read
) -> None:
    for pieces in ([text], list(text), cut(text, [*range(0, len(text), 3)])):
        assert read(FORMATS[form], pieces, TOOLS, starts_in=begun) == parts


@pytest.mark.parametrize(("form", "begun", "text", "parts"), ANSWERS, ids=NAMES)
def test_what_was_given_out_is_the_beginning_of_the_answer_wherever_it_ends(
    form: str, begun: Any, text: str, parts: Read
) -> None:
    reader = AnswerReader(FORMATS[form], TOOLS, starts_in=begun)
    pieces: list[Any] = []
    for char in text:
        pieces += reader.push(char)
        so_far = put_together(pieces)
        assert parts.content.startswith(so_far.content), "no mark is half in the content"
        assert parts.thoughts.startswith(so_far.thoughts)
        for (name, arguments), (whole_name, whole) in zip(so_far.calls, parts.calls, strict=False):
            assert name == whole_name and whole.startswith(arguments)


@pytest.mark.parametrize(("form", "begun", "text", "parts"), ANSWERS, ids=NAMES)
def test_a_call_that_is_cut_off_is_not_taken_for_a_whole_one(form: str, begun: Any, text: str, parts: Read) -> None:
    for place in range(len(text)):
        found = read(FORMATS[form], [text[:place]], TOOLS, starts_in=begun)
        for (_, arguments), (_, whole) in zip(found.calls, parts.calls, strict=False):
            if arguments != whole:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(arguments)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '{"a": 1}', '{"a": 1}'),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/A"}]}, '{"a": 1}', {"a": 1}),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"enum": ["1", "2", None]}, "1", "1"),
        ({"const": "7"}, "7", "7"),
        ({}, "7", 7),
    ],
)
def test_a_value_between_tags_has_a_type_that_its_schema_allows(schema: Any, written: str, value: Any) -> None:
    tools = {"f": {"type": "object", "properties": {"v": schema}}}
    text = f"<tool_call>\n<function=f>\n<parameter=v>\n{written}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = read(FORMATS["qwen3-coder"], [text], tools).calls
    assert json.loads(arguments) == {"v": value}


@pytest.mark.parametrize("closing", ["</think>", "\n\n</think>"])
def test_thoughts_without_text_leave_no_blank_lines_before_the_content(closing: str) -> None:
    assert read(FORMATS["hermes"], ["<think>", closing, "\n\n", "Hi"], TOOLS) == Read("Hi")


@st.composite
def answers_of_marks(draw: st.DrawFn) -> tuple[str, str]:
    """Return a format and a text of its marks, of their parts, and of what stands between them."""
    form = draw(st.sampled_from(sorted(FORMATS)))
    marks = sorted({text for text in texts_of(FORMATS[form]) if text} - {form}) or ["x"]
    cuts = st.tuples(st.sampled_from(marks), st.integers(0, 40), st.integers(1, 40)).map(
        lambda one: one[0][one[1] : one[2]]
    )
    others = [
        "rm",
        "add",
        "p",
        "n",
        '{"name": "rm", "arguments": {"p": "/"}}',
        '{"p": "a"}',
        "{",
        "}",
        '"',
        ":",
        ",",
        "\n",
        " ",
    ]
    one = st.sampled_from(marks) | st.sampled_from(marks) | cuts | st.sampled_from([*others, "[", "]", "\\", "\u6587"])
    return form, "".join(draw(st.lists(one, max_size=14)))


@given(
    answer=answers_of_marks(),
    places=st.lists(st.integers(0, 300), max_size=12),
    begun=st.sampled_from([None, "thoughts", "content"]),
    takes_bare=st.booleans(),
    most_calls=st.sampled_from([None, 1]),
)
def test_a_text_of_marks_is_read_the_same_however_it_is_cut(
    answer: tuple[str, str], places: list[int], begun: Any, takes_bare: bool, most_calls: int | None
) -> None:
    form, text = answer
    how: dict[str, Any] = {"starts_in": begun, "takes_bare": takes_bare, "most_calls": most_calls}
    whole = read(FORMATS[form], [text], TOOLS, **how)
    assert read(FORMATS[form], cut(text, places), TOOLS, **how) == whole
    assert read(FORMATS[form], list(text), TOOLS, **how) == whole


@given(
    form=st.sampled_from(sorted(FORMATS)),
    texts=st.lists(
        st.sampled_from([*(text for _, _, text, _ in ANSWERS), "x", "\n", " ", "{", "</", "<|", "["]), max_size=4
    ),
    places=st.lists(st.integers(0, 900), max_size=30),
    begun=st.sampled_from([None, "thoughts", "content"]),
)
def test_any_text_in_any_format_is_read_the_same_however_it_is_cut(
    form: str, texts: list[str], places: list[int], begun: Any
) -> None:
    text = "".join(texts)
    whole = read(FORMATS[form], [text], TOOLS, starts_in=begun)
    assert read(FORMATS[form], cut(text, places), TOOLS, starts_in=begun) == whole
    assert read(FORMATS[form], list(text), TOOLS, starts_in=begun) == whole


# Format, and an answer in it up to the text of an argument.
OPENED = [
    ("hermes", '<tool_call>{"name": "rm", "arguments": {"p": "'),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "rm", "parameters": {"p": "'),
    ("mistral-args", '[TOOL_CALLS]rm[ARGS]{"p": "'),
    ("gpt-oss", '<|channel|>commentary to=functions.rm<|message|>{"p": "'),
    ("qwen3-coder", "<tool_call>\n<function=rm>\n<parameter=p>\n"),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="rm">\n<parameter name="p">'),
    ("glm4", "<tool_call>rm\n<arg_key>p</arg_key>\n<arg_value>"),
    ("gemma4", '<|tool_call>call:rm{p:<|"|>'),
    ("minimax-m3", f'{M3}<tool_call>\n{M3}<invoke name="rm">{M3}<p>'),
    (
        "kimi-k3",
        '<|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|><|open|>argument key="p" type="string"<|sep|>',
    ),
    ("deepseek-v4", f'<{DSML}tool_calls>\n<{DSML}invoke name="rm">\n<{DSML}parameter name="p" string="true">'),
    ("functionary-v3.2", 'rm\n{"p": "'),
    ("apertus", '<|tools_prefix|>[{"rm": {"p": "'),
    (
        "muse",
        ' to=rm<|message|><atem:function_calls>\n<atem:invoke name="rm">\n<atem:parameter name="p">',
    ),
]


@pytest.mark.parametrize(("form", "text"), OPENED)
def test_a_long_argument_comes_as_it_is_written(form: str, text: str) -> None:
    reader = AnswerReader(FORMATS[form], TOOLS)
    assert put_together(reader.push(text)).calls == [("rm", '{"p": "')]
    for _ in range(3):
        (piece,) = reader.push("x" * 1000)
        assert piece == CallArguments(0, "x" * 1000)


# ---- the models' own templates --------------------------------------------------------------------------------------

ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (TEMPLATES / "README.md").read_text("utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| template", "| ---"))
]
HERE = {name: (digest, form) for name, digest, form, licence in ROWS if licence}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def test_the_templates_are_those_of_their_source_and_their_formats_are_found() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(HERE)
    for name, (digest, form) in HERE.items():
        assert hashlib.sha256((TEMPLATES / f"{name}.jinja").read_bytes()).hexdigest() == digest
        found = find_format(template(name), ())
        assert found is not None and found.name == form, name


NASTY: list[dict[str, Any]] = [
    {"p": 'a\nb "c" </tool_call> {x}', "n": -3},
    {"p": "12", "l": [1, "x, y", {"k": None}], "b": False},
    {"p": "caf\u00e9 \\ 'q' & <b>", "o": {"a": {"b": [True]}}},
]
WRITERS = {  # templates that write thoughts and calls of earlier turns; those of the others write neither
    "Qwen-Qwen3-0.6B": "<|im_end|>",
    "Qwen3-Coder": "<|im_end|>",
    "Qwen3.5-4B": "<|im_end|>",
    "GLM-4.6": "",
    "MiniMax-M2": "[e~[",
    "ByteDance-Seed-OSS": "<seed:eos>",
    "google-gemma-4-31B-it": "<|tool_response>",
    "mistralai-Ministral-3-14B-Reasoning-2512": "</s>",
    "mistralai-Mistral-Nemo-Instruct-2407": "</s>",
    "deepseek-ai-DeepSeek-V3.1": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "openai-gpt-oss-120b": "",
    "Apertus-8B-Instruct": "",
    "GigaChat3-10B-A1.8B": "",
    "GigaChat3.1-10B-A1.8B": "",
    "MiniMax-M1": "<end_of_sentence>",
    "deepseek-ai-DeepSeek-V3.2": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek-ai-DeepSeek-V4": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "meetkai-functionary-medium-v3.1": "<|eom_id|>",
    "meetkai-functionary-medium-v3.2": "<|eot_id|>",
    "openbmb-MiniCPM5-1B": "<|im_end|>",
}


def written(name: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Return a prompt in a model's template, and the text that the template makes of an answer to it."""
    tokenizer: Any = SimpleNamespace(
        get_chat_template=lambda tools=None: template(name),
        special_tokens_map={"bos_token": "<s>", "eos_token": WRITERS[name]},
    )
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    told = [{"type": "function", "function": {"name": "rm", "description": "d", "parameters": TOOLS["rm"]}}]
    variables = {"thinking": True}  # as DeepSeek's templates name it
    prompt = render_chat(tokenizer, asked, tools=told, add_generation_prompt=True, template_kwargs=variables)
    whole = render_chat(tokenizer, [*asked, answer], tools=told, template_kwargs=variables)
    pairs = zip(prompt, whole, strict=False)
    common = "".join(char for char, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert common.rstrip() == prompt.rstrip() or len(prompt) - len(common) < 40, "the prompt is where the answer begins"
    text = whole[len(common) :].removesuffix("\n")
    return common, text.removesuffix(WRITERS[name]) if WRITERS[name] else text


def with_call(arguments: dict[str, Any], thoughts: str, content: str = "") -> dict[str, Any]:
    """Return a message with thoughts and a call."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "rm", "arguments": arguments}}
    return {"role": "assistant", "content": content, "reasoning_content": thoughts, "tool_calls": [call]}


def read_behind(form: AnswerFormat, prompt: str, text: str) -> Read:
    """Read what was written behind a prompt."""
    opening = form.thoughts[0].strip() if form.thoughts else "\0"
    return read(form, list(text), TOOLS, starts_in="thoughts" if prompt.rstrip().endswith(opening) else None)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("arguments", NASTY)
def test_what_a_models_template_writes_for_a_call_is_read_as_that_call(name: str, arguments: dict[str, Any]) -> None:
    form = find_format(template(name), ())
    assert form is not None
    prompt, text = written(name, with_call(arguments, "Hm so."))
    found = read_behind(form, prompt, text)
    assert [(name, json.loads(given)) for name, given in found.calls] == [("rm", arguments)], text
    assert not found.content.strip(), text
    assert found.thoughts in ("Hm so.", "")
