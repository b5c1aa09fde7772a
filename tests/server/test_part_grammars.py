"""What grammars of answers let pass in each format: thoughts first, then calls or content that keep to their schema."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from card.config import Grammar
from card.models.demo import demo_folder
from card.models.loading import load_tokenizer
from card.server.tool_schemas import FunctionDefinition
from card.server.tools.grammar import Guide
from card.text.grammar import GrammarCompiler
from card.text.parts.formats import FORMATS
from tests.shaping import permits

pytest.importorskip("llguidance")
pytestmark = pytest.mark.timeout(180)

END = 0
MARKS = re.compile(
    r"<\|[\w:\"|]+>\n*|<[\w]+\|>|<\uff5c[^>]+>|</?think>|</?arg_\w+>|</?tool_call>|\[[A-Z_/]+\]|</?seed:\w+>"
    r"|\]<\]minimax\[>\[|</?mm:think>|\uff5cDSML\uff5c|</?\w+:opensource>"
)
SCHEMA = {
    "type": "object",
    "properties": {"p": {"type": "string"}, "n": {"type": "integer", "minimum": 0, "maximum": 5}},
    "required": ["p"],
}
RM = FunctionDefinition(name="rm", parameters=SCHEMA, strict=True)
ADD = FunctionDefinition(name="add", parameters={"type": "object", "properties": {}}, strict=True)
DS = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)
M3 = "]<]minimax[>["
DSML = "\uff5cDSML\uff5c"
DE = ("<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
# Format: thoughts, and a call of `rm` with an n in it, which may be 3 and not 9.
WRITTEN: dict[str, tuple[str, str]] = {
    "hermes": (
        "<think>\nHm.\n</think>\n\n",
        '<tool_call>\n{"name": "rm", "arguments": {"p": "a", "n": 3}}\n</tool_call>',
    ),
    "qwen3-coder": (
        "<think>\nHm.\n</think>\n\n",
        "<tool_call>\n<function=rm>\n<parameter=p>\na\nb\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "seed-oss": (
        "<seed:think>Hm.</seed:think>",
        "<seed:tool_call>\n<function=rm>\n<parameter=p>a</parameter>\n"
        "<parameter=n>3</parameter>\n</function>\n</seed:tool_call>",
    ),
    "glm4": (
        "<think>Hm.</think>\n",
        "<tool_call>rm\n<arg_key>p</arg_key>\n<arg_value>a</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    "minimax-m2": (
        "<think>\nHm.\n</think>\n\n",
        '<minimax:tool_call>\n<invoke name="rm">\n<parameter name="p">a</parameter>\n'
        '<parameter name="n">3</parameter>\n'
        "</invoke>\n"
        "</minimax:tool_call>",
    ),
    "mistral": ("", '[TOOL_CALLS][{"name": "rm", "arguments": {"p": "a", "n": 3}}]'),
    "mistral-args": ("[THINK]Hm.[/THINK]", '[TOOL_CALLS]rm[ARGS]{"p": "a", "n": 3}'),
    "lfm2": ("<think>Hm.</think>", '<|tool_call_start|>[rm(p="a", n=3)]<|tool_call_end|>'),
    "gemma4": ("<|channel>thought\nHm.<channel|>", '<|tool_call>call:rm{p:<|"|>a<|"|>,n:3}<tool_call|>'),
    "granite3": ("<think>Hm.</think>", '<|tool_call|>[{"name": "rm", "arguments": {"p": "a", "n": 3}}]'),
    "cohere": (
        "<|START_THINKING|>Hm.<|END_THINKING|>",
        '<|START_ACTION|>[{"tool_name": "rm", "parameters": {"p": "a", "n": 3}}]<|END_ACTION|>',
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        '<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{"p": "a", "n": 3}',
    ),
    "solar": (
        "<|think|>Hm.<|end|><|begin|>assistant",
        '<|tool_calls|><|tool_call:begin|>abc1<|tool_call:name|>rm<|tool_call:args|>{"p": "a", "n": 3}'
        "<|tool_call:end|>",
    ),
    "kimi-k2": (
        "<think>Hm.</think>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{"p": "a", "n": 3}'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek-r1": (
        "<think>Hm.</think>",
        f'{DS[0]}{DS[1]}function{DS[2]}rm\n```json\n{{"p": "a", "n": 3}}\n```{DE[0]}{DE[1]}',
    ),
    "deepseek-v3": ("<think>Hm.</think>", f'{DS[0]}{DS[1]}rm{DS[2]}{{"p": "a", "n": 3}}{DE[0]}{DE[1]}'),
    "apriel-1.6": (
        "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n",
        '<tool_calls>[{"name": "rm", "arguments": {"p": "a", "n": 3}}]</tool_calls>',
    ),
    "minimax-m1": (
        "<think>Hm.</think>",
        '<tool_calls>\n{"name": "rm", "arguments": {"p": "a", "n": 3}}\n</tool_calls>',
    ),
    "minimax-m3": (
        "<mm:think>Hm.</mm:think>",
        f'{M3}<tool_call>\n{M3}<invoke name="rm">{M3}<p>a </p>{M3}</p>{M3}<n>3{M3}</n>{M3}</invoke>\n{M3}</tool_call>',
    ),
    "kimi-k3": (
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|>",
        '<|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|><|open|>argument key="p" type="string"<|sep|>a'
        '<|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call'
        "<|sep|><|close|>tools<|sep|>",
    ),
    "deepseek-v4": (
        "<think>Hm.</think>",
        f'<{DSML}tool_calls>\n<{DSML}invoke name="rm">\n<{DSML}parameter name="p" string="true">a</{DSML}parameter>\n'
        f'<{DSML}parameter name="n" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>',
    ),
    "gigachat3": ("", 'function call<|role_sep|>\n{"name": "rm", "arguments": {"p": "a", "n": 3}}'),
    "gigachat3.1": ("", '<|function_call|>{"name": "rm", "arguments": {"p": "a", "n": 3}}'),
    "functionary-v3.1": ("", '<function=rm>{"p": "a", "n": 3}</function>'),
    "functionary-v3.2": ("", 'rm\n{"p": "a", "n": 3}'),
    "minicpm5": (
        "<think>Hm.</think>",
        '<function name="rm"><param name="p"><![CDATA[<a>]]></param><param name="n">3</param></function>',
    ),
    "apertus": (
        "<|inner_prefix|>Hm.<|inner_suffix|>",
        '<|tools_prefix|>[{"rm": {"p": "a", "n": 3}}]<|tools_suffix|>',
    ),
    "hunyuan3": (
        "<think:opensource>Hm.</think:opensource>",
        "<tool_calls:opensource>\n<tool_call:opensource>rm<tool_sep:opensource>\n"
        "<arg_key:opensource>p</arg_key:opensource>\n<arg_value:opensource>a</arg_value:opensource>\n"
        "<arg_key:opensource>n</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>",
    ),
    "muse": (
        " to=self<|message|>Hm.<|eom|><|start|>assistant",
        ' to=rm<|message|><atem:function_calls>\n<atem:invoke name="rm">\n<atem:parameter name="p">a</atem:parameter>\n'
        '<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
}
BEFORE_CONTENT = {
    "gpt-oss": "<|channel|>final<|message|>",
    "solar": "<|content|>",
    "muse": " to=user<|message|>",
    "functionary-v3.2": "all\n",
}


@functools.cache
def _compiler() -> tuple[GrammarCompiler, Any]:
    tokenizer = load_tokenizer(demo_folder("target"))
    return GrammarCompiler(tokenizer, 4096, (END, 3)), tokenizer


def mark_ids(form: str, has_tokens: bool) -> dict[str, int]:
    """Return tokens of the demo model that stand for the marks of a format."""
    marks = sorted(set(MARKS.findall("".join(WRITTEN[form]) + BEFORE_CONTENT.get(form, "")))) if has_tokens else []
    return {mark: 2000 + idx for idx, mark in enumerate(marks)}


def fits(grammar: Grammar, text: str, marks: dict[str, int]) -> bool:
    """Return whether a whole answer keeps to a grammar."""
    compiler, tokenizer = _compiler()
    ids: list[int] = []
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    for piece in filter(None, re.split(f"({pattern})", text) if marks else [text]):
        ids += [marks[piece]] if piece in marks else tokenizer.encode(piece, add_special_tokens=False)
    return all(permits(compiler.compile(grammar), [[*ids, END]], frozenset({END, 3})))


def guide(form: str, has_tokens: bool, **how: Any) -> tuple[Guide, dict[str, int]]:
    marks = mark_ids(form, has_tokens)
    return Guide(form=FORMATS[form], mark_ids=marks, **how), marks


# The marks of channels are tokens in all models that have them.
every_kind = pytest.mark.parametrize(
    ("form", "has_tokens"),
    [
        (form, has_tokens)
        for form in WRITTEN
        for has_tokens in (False, True)
        if has_tokens or form not in BEFORE_CONTENT
    ],
)


@every_kind
def test_forced_calls_stand_behind_thoughts_and_keep_to_their_schema(form: str, has_tokens: bool) -> None:
    made, marks = guide(form, has_tokens, functions=(RM, ADD), is_forced=True)
    thoughts, call = WRITTEN[form]
    grammar = made.grammar(None)
    assert grammar is not None
    for text in (call, thoughts + call):
        assert fits(grammar, text, marks), text
    for text in (call.replace("3", "9"), thoughts + "Hello", call.replace("rm", "xy")):
        assert not fits(grammar, text, marks), text
    if FORMATS[form].thoughts is not None and thoughts:
        begun = made.grammar("thoughts")
        opening = FORMATS[form].thoughts[0]  # type: ignore[index]
        assert begun is not None and fits(begun, (thoughts + call).removeprefix(opening), marks)


@every_kind
def test_a_schema_holds_the_content_behind_thoughts(form: str, has_tokens: bool) -> None:
    made, marks = guide(form, has_tokens, content=Grammar("json_schema", '{"enum": ["forty", 2]}'))
    thoughts, before = WRITTEN[form][0], BEFORE_CONTENT.get(form, "")
    grammar = made.grammar(None)
    assert grammar is not None
    for content in ('"forty"', "2"):
        assert fits(grammar, before + content, marks) and fits(grammar, thoughts + before + content, marks)
    assert not fits(grammar, thoughts + before + "3", marks)


@every_kind
def test_calls_or_a_schema_or_any_text_with_good_calls(form: str, has_tokens: bool) -> None:
    thoughts, call = WRITTEN[form]
    before = BEFORE_CONTENT.get(form, "")
    either, marks = guide(form, has_tokens, functions=(RM,), content=Grammar("json_schema", '{"enum": ["forty", 2]}'))
    free, _ = guide(form, has_tokens, functions=(RM,))
    for made, content in ((either, "2"), (free, "Hello")):
        grammar = made.grammar(None)
        assert grammar is not None
        assert fits(grammar, thoughts + before + content, marks)
        assert fits(grammar, thoughts + call, marks)
        assert not fits(grammar, thoughts + call.replace("3", "9"), marks)


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("cohere", "<|START_RESPONSE|>Hello<|END_RESPONSE|>"),
        ("kimi-k3", "<|open|>response<|sep|>Hello<|close|>response<|sep|>"),
        ("gigachat3", "Hello<|message_sep|>\n\n"),
        ("functionary-v3.2", "all\nHello>>>"),
    ],
)
def test_content_with_its_marks_may_stand_before_good_calls(form: str, content: str) -> None:
    marks = {mark: 2000 + idx for idx, mark in enumerate(sorted(set(MARKS.findall(content + WRITTEN[form][1]))))}
    grammar = Guide(form=FORMATS[form], mark_ids=marks, functions=(RM,)).grammar("content")
    call = WRITTEN[form][1]
    assert grammar is not None and fits(grammar, content.removesuffix(">>>"), marks)
    assert fits(grammar, content + call, marks)
    assert not fits(grammar, content + call.replace("3", "9"), marks)


def test_a_forced_call_may_stand_behind_a_response_without_text() -> None:
    made, marks = guide("kimi-k3", True, functions=(RM,), is_forced=True)
    grammar, call = made.grammar("thoughts"), WRITTEN["kimi-k3"][1]
    empty = "<|open|>response<|sep|><|close|>response<|sep|>"
    assert grammar is not None and fits(grammar, f"Hm.<|close|>think<|sep|>{empty}{call}", marks)


@pytest.mark.parametrize("form", ["muse", "functionary-v3.2", "minicpm5", "apertus", "minimax-m3", "kimi-k3"])
def test_forced_calls_may_be_several_each_as_the_format_joins_them(form: str) -> None:
    made, marks = guide(form, True, functions=(RM, ADD), is_forced=True)
    single, _ = guide(form, True, functions=(RM, ADD), is_forced=True, allows_several=False)
    first = WRITTEN[form][1]
    joined = {
        "muse": f"{first}<|eom|><|start|>assistant{first}",
        "functionary-v3.2": f"{first}>>>add\n{{}}",
        "minicpm5": f'{first}\n<function name="add"></function>',
        "apertus": first.replace("}}]", '}}, {"add": {}}]'),
        "minimax-m3": first.replace(f"{M3}</tool", f'{M3}<invoke name="add">{M3}</invoke>\n{M3}</tool'),
        "kimi-k3": first.replace(
            "<|close|>tools", '<|open|>call tool="add" index="2"<|sep|><|close|>call<|sep|><|close|>tools'
        ),
    }[form]
    grammar, alone = made.grammar(None), single.grammar(None)
    assert grammar is not None and fits(grammar, joined, marks)
    assert alone is not None and fits(alone, first, marks) and not fits(alone, joined, marks)


NESTED = {
    "type": "object",
    "properties": {
        "o": {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]},
        "l": {"type": "array", "items": {"enum": ["a", "b"]}},
        "x": {},
    },
    "required": ["o", "l"],
}


def test_nested_elements_keep_to_their_schemas() -> None:
    named = FunctionDefinition(name="rm", parameters=NESTED, strict=True)
    made, marks = guide("minimax-m3", True, functions=(named,), is_forced=True)
    grammar = made.grammar(None)

    def call(flag: str, item: str) -> str:
        inner = f"{M3}<o>{M3}<k>{flag}{M3}</k>{M3}</o>{M3}<l>{M3}<item>{item}{M3}</item>{M3}<item>b{M3}</item>{M3}</l>"
        return f'{M3}<tool_call>\n{M3}<invoke name="rm">{inner}{M3}<x>any{M3}</x>{M3}</invoke>\n{M3}</tool_call>'

    assert grammar is not None and fits(grammar, call("true", "a"), marks)
    assert not fits(grammar, call("maybe", "a"), marks) and not fits(grammar, call("true", "c"), marks)


OTHERS = (
    Grammar("regex", "[ab]/c"),
    Grammar("lark", 'start: x "/c"\nx: "a" | "b" | start'),
    Grammar("lark", 'start: answer\nanswer: lead "/c"\nlead: "a" | "b"'),
    Grammar("gbnf", 'root ::= x "/c"\nx ::= "a" | "b"'),
    Grammar("gbnf", 'root ::= answer\nanswer ::= lead "/c" [^x]?\nlead ::= "a" | "b" # root ::= x'),
)


@pytest.mark.parametrize("source", OTHERS)
def test_other_grammars_begin_behind_thoughts_too(source: Grammar) -> None:
    made, marks = guide("hermes", True, content=source)
    grammar = made.grammar("thoughts")
    assert grammar is not None and fits(grammar, "start x</think>\n\na/c", marks)
    assert not fits(grammar, "start x</think>\n\nc", marks)


@pytest.mark.parametrize("form", ["hermes", "gpt-oss", "solar", "gemma4", "kimi-k3", "muse"])
def test_a_budget_bounds_the_thoughts_and_nothing_else(form: str) -> None:
    made, marks = guide(form, True, thinking_budget=2)
    grammar = made.grammar(None)
    assert grammar is not None
    thoughts, before = WRITTEN[form][0], BEFORE_CONTENT.get(form, "")
    assert fits(grammar, thoughts.replace("\nHm.\n", "Hm").replace("Hm.", "Hm") + before + "Hello " * 9, marks)
    assert not fits(grammar, thoughts.replace("Hm.", "Hm so it is what it is") + before + "Hello", marks)
    assert fits(grammar, before + "Hello " * 9, marks)
