"""Chat templates write what transformers writes, and end in one line before they cost what no conversation needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from card.errors import PromptError
from card.text import work_meter
from card.text.chat_template import render_chat
from card.text.given_tokenizer import as_tokenizer
from card.text.prompts import encode_chat, split_images, turn_end_id
from card.text.work_meter import TemplateCostError, WorkMeter
from tests.hostile_templates import ENDLESS, HUGE
from tests.pair import make_tokenizer, own_tokenizer

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def told(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds é <b>.", "parameters": {"a": [1, None]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [told("user", "hi")],
    [
        told("system", 'Be <b>brief</b> & "good".\n'),
        told("user", " hi \n"),
        told("assistant", "yé\n"),
        told("user", "€"),
    ],
    [told("user", "add"), told("assistant", None, tool_calls=[called({"a": 1})]), told("tool", "1", tool_call_id="x")],
    [told("user", "q"), told("assistant", "<think>\nhm\n</think>\n\nans", reasoning_content="hm"), told("user", "so?")],
    [told("user", [{"type": "text", "text": "see"}, {"type": "image"}]), told("assistant", "seen")],
    [told("assistant", "first"), told("assistant", "")],
]
# What published templates are made of, each in its own words.
TEMPLATES: dict[str, str] = {
    "the tests' own": str(make_tokenizer().chat_template),
    "tools": "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}<tool_call> {{ messages[-1].content }}",
    "turns": "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' + m['content'] }}{% if not loop.last %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "a system's message first": "{{ bos_token }}{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "{{- messages[0].content | trim + '\\n' }}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns!') }}{% endif %}"
    "[{{ m.role | upper }}] {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}",
    "tools in JSON": "{% for t in tools or [] %}{{ t | tojson(indent=2) }}{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages if m.tool_calls is defined and m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments | tojson if c.function.arguments is mapping else c.function.arguments }}{% endfor %}"
    "{% else %}none{% endfor %}",
    "namespaces": "{% set ns = namespace(out='', last=-1, kept=[]) %}{% for m in messages[::-1] %}"
    "{% if m.role == 'user' "
    "%}{% set ns.last = loop.revindex0 %}{% break %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% set ns.kept = ns.kept + [m] %}{% if m.content is string %}{% set ns.out = ns.out ~ m.content ~ '|' %}"
    "{% endif %}"
    "{% endfor %}{{ ns.out }}{{ ns.last }}{{ ns.kept | length }}{{ ns.out.split('|')[-1] }}",
    "macros": "{% macro text(content) -%}{% if content is string %}{{ content }}{% elif content is iterable %}"
    "{% for p in content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}{%- endmacro %}"
    "{% macro frame(role) %}<{{ role }}>{{ caller() }}</{{ role }}>{% endmacro %}"
    "{% for m in messages %}{% call frame(m.role) %}{{ text(m.content) | trim }}{% endcall %}{% endfor %}",
    "thoughts": "{% for m in messages %}{% set c = m.content or '' %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ c }}({{ m.reasoning_content }})({{ m.thinking }})"
    "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | "
    "list | length }}{{ (messages | rejectattr('role', 'in', ['user']) | first | default({})).role }}"
    "{{ messages | groupby('role') | map('first') | join }}{{ messages[0].items() | list | length }}"
    "{{ 'a b' | replace(' ', '_') | center(9) | indent(3) }}{{ [3, 1, 2] | sort | reverse | join('-') }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ '%s is %d' | format('x', 3) }}"
    "{{ [1, 1, 2] | unique | list }}{{ [2, 5] | max }}{{ 7 | round(1) }}{{ 'x' | e }}{{ '<' | safe }}",
    "operators": "{{ 3 ** 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ '%03d|%s' % (5, [1]) }}{{ '-' * 5 }}{{ [0] * 3 }}"
    "{{ 1 < 2 < 3 }}"
    "{{ 'a' in 'abc' and 1 not in [2] }}{{ '{:>5}|{x}'.format('a', x=[1]) }}{{ -3 | abs }}{{ (1, 2) == (1, 2) }}"
    "{{ 1.5 * 2 }}{{ [1] + [2] }}{{ {'a': 1}.get('b', 'c') }}{{ 'a,b'.replace(',', ';').join(['x', 'y']) }}{{ 1 > 2 }}",
    "all sorts": "{% set x %}a{{ messages | length }}{% endset %}{{ x }}{% for i in range(3) recursive %}{{ i }}"
    "{{ loop([]) if i == 1 }}{{ loop.cycle('a', 'b') }}{{ loop.changed(i) }}{% endfor %}{% filter upper %}b"
    "{% endfilter %}"
    "{% generation %}gen{% endgeneration %}{{ dict(a=1) | tojson }}{{ strftime_now('%Y') }}{{ unknown }}"
    "{% with y = 2 %}{{ y }}{% endwith %}{% block b %}block"
    "{% endblock %}{{ self.b() }}{{ (messages | list)[0:1] | length }}",
    "what an assistant writes": "{% set x = 'out' %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{%- generation -%}{% set x = 'in' %}{{ m.content }}{{ x }}{{ loop.index }}{%- endgeneration -%}{% else %}"
    "{{ m.role }}{% endif %}{{ x }}{% endfor %}{% macro said(m) %}{% generation %}{{ m.role }}{% endgeneration %}"
    "{% endmacro %}{{ said(messages[-1]) }}{% generation %}{% endgeneration %}{{ x }}",
    "JSON as it is wanted": "{% set v = {'b': ['é', '<&>'], 'a': none, 'c': 1.5} %}{{ v | tojson }}"
    "{{ v | tojson(ensure_ascii=true) }}{{ v | tojson(indent=4, sort_keys=true) }}"
    "{{ v | tojson(separators=(',', ':')) }}"
    "{{ v | tojson(false, 2, (' , ', ' : '), true) }}{{ messages | tojson }}{{ 'é' | tojson }}{{ nothing | tojson }}",
    "namespaces with a value called self": "{% set ns = namespace({'a': 1}, self=2, b=3) %}{{ ns.self }}{{ ns.a }}"
    "{% set ns.b = ns.b + 1 %}{{ ns.b }}{{ ns.nothing }}{{ dict([('x', 1)], y=2) }}{{ dict.fromkeys(['k']) }}",
    "refuses": "{{ raise_exception('no ' ~ messages[0].role) }}",
    "escapes": "{{ messages.__class__ }}{{ ''.__class__.__mro__ }}",
}


class Templated:
    """A tokenizer as far as templates see it."""

    special_tokens_map = _SPECIAL

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self, tools: object = None) -> str:
        return self.chat_template


def ours(template: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    tokenizer: Any = Templated(template)
    try:
        return render_chat(tokenizer, messages, **options)
    except TemplateCostError:
        raise
    except PromptError as error:
        return str(error)


def theirs(template: str, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], **options: Any) -> str:
    chat = [{key: value for key, value in one.items() if value is not None} for one in messages]
    try:
        return str(render_jinja_template([chat], chat_template=template, **options, **{**_SPECIAL, **kwargs})[0][0])
    except Exception as error:
        return f"the model's chat template refuses the messages: {' '.join(str(error).split())}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_transformers_writes(name: str) -> None:
    for messages, tools, asks, kwargs in itertools.product(
        CONVERSATIONS, (None, [TOOL]), (False, True), ({}, {"enable_thinking": False, "eos_token": "<end>"})
    ):
        expected = theirs(TEMPLATES[name], messages, kwargs, tools=tools, add_generation_prompt=asks)
        got = ours(TEMPLATES[name], messages, tools=tools, add_generation_prompt=asks, template_kwargs=kwargs)
        assert got == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(_a=1) %}{{ ns._a }}",
        "{% set ns = namespace() %}{% set ns._b = 1 %}",
        "{{ dict.mro() }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ lipsum() }}",
    ],
)
def test_a_template_that_reaches_for_what_it_may_not_have_is_refused(template: str) -> None:
    tokenizer: Any = Templated(template)
    with pytest.raises(PromptError, match="the model's chat template refuses the messages"):
        render_chat(tokenizer, CONVERSATIONS[0])


def test_a_conversation_with_a_template_becomes_the_ids_that_transformers_makes_of_it() -> None:
    tokenizer = make_tokenizer()
    messages = CONVERSATIONS[1]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode_chat(as_tokenizer(tokenizer), messages) == expected


def test_two_thousand_messages_and_two_hundred_tools_are_far_from_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [told("user" if idx % 2 == 0 else "assistant", f"{idx} " * 50) for idx in range(2000)]
    tools = [{**TOOL, "text": "x" * 1000} for _ in range(200)]
    growing = (
        "{% set ns = namespace(out='') %}{% for t in tools %}{% set ns.out = ns.out ~ (t | tojson) %}{% endfor %}"
        "{% for m in messages %}{% set ns.out = ns.out ~ m.content ~ '|' %}{% for n in messages[loop.index:] %}"
        "{% if n.role == 'tool' %}!{% endif %}{% break %}{% endfor %}{% endfor %}{{ ns.out }}"
    )
    meters: list[WorkMeter] = []
    begin = WorkMeter.__init__

    def noted(self: WorkMeter, values: Mapping[str, Any]) -> None:
        begin(self, values)
        meters.append(self)

    monkeypatch.setattr(WorkMeter, "__init__", noted)
    assert len(ours(growing, messages, tools=tools)) > 400_000
    assert meters[0].share_used < 0.5


@pytest.mark.parametrize("name", ENDLESS | HUGE)
def test_a_template_that_has_no_end_or_fills_the_memory_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_meter, "BASE_STEPS", 30_000)
    monkeypatch.setattr(work_meter, "BASE_CHARS", 300_000)
    tokenizer: Any = Templated((ENDLESS | HUGE)[name])
    with pytest.raises(PromptError) as refused:
        render_chat(tokenizer, CONVERSATIONS[0])
    said = str(refused.value)
    assert "chat template" in said and len(said.splitlines()) == 1 and len(said) < 500


def test_costs_are_counted_the_same_each_time() -> None:
    said = set()
    for num_rounds in (50, 60, 60):
        tokenizer: Any = Templated(
            "{% for i in range(" + str(num_rounds) + ") %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        )
        with pytest.raises(
            TemplateCostError, match=r"takes more than 3,[0-9,]+ steps, which no conversation"
        ) as refused:
            render_chat(tokenizer, CONVERSATIONS[0])
        said.add(str(refused.value))
    assert len(said) == 1


def test_a_tokenizer_whose_template_has_no_end_is_refused_when_it_is_loaded() -> None:
    tokenizer = own_tokenizer()
    tokenizer.chat_template = ENDLESS["loops in loops"]
    with pytest.raises(TemplateCostError, match="the chat template takes more than"):
        turn_end_id(tokenizer)


@pytest.mark.parametrize("part", [{}, {"text": None}, {"text": 3}, {"text": b"a"}, {"text": ["a"]}], ids=str)
def test_a_part_without_a_text_is_refused_and_never_told_as_none(part: dict[str, Any]) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", **part}]}]
    with pytest.raises(PromptError, match="the text of a part of message 0 must be a string, got "):
        split_images(talk)
