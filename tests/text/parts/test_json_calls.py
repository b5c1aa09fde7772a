"""Calls are read from a text as it grows: every way to cut it gives the same, and what is no call stays content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from card.text.parts.answer_format import AnswerFormat
from card.text.parts.calls import JsonCalls
from card.text.parts.formats import HERMES, LLAMA3, MISTRAL
from card.text.parts.pieces import CallArguments, CallBegun
from card.text.parts.reader import AnswerReader
from tests.text.parts import reading
from tests.text.parts.reading import Read, cut

NAMES: dict[str, dict[str, object]] = {"add": {}, "get_weather": {}}
FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}


def read(form: JsonCalls, pieces: list[str], *, is_live: bool = False, most_calls: int | None = None) -> Read:
    """Read a text that comes in pieces."""
    return reading.read(_whole(form), pieces, NAMES, takes_bare=not is_live, most_calls=most_calls)


def reader_of(form: JsonCalls) -> AnswerReader:
    return AnswerReader(_whole(form), NAMES)


def _whole(form: JsonCalls) -> AnswerFormat:
    return AnswerFormat(name="this", calls=form)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=4), VALUES, max_size=3)), max_size=3
)
FORMS = st.sampled_from([HERMES, LLAMA3, MISTRAL])
FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[", "]", ",", ";", "<|python_tag|>", "{", "}", '"']
    )
    | st.sampled_from(
        ['{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {}}', "\\", " ", "\n", "hi", "\u00e9"]
    )
    | st.sampled_from(
        [
            "```",
            "```json\n",
            '{"name": "other", "arguments": {}}',
            '{"name": "add", "arguments": "x"}',
            ":",
            '"name"',
            "{" * 3,
            '{{"name": "add", "arguments": {"a": 1}}}',
            "3",
        ]
    ),
    max_size=14,
).map("".join)
PLACES = st.lists(st.integers(0, 400), max_size=40)


@given(form=FORMS, calls=CALLS, places=PLACES, is_live=st.booleans(), before=st.sampled_from(["", "Let me see. "]))
def test_calls_that_were_written_are_read_however_the_text_is_cut(
    form: JsonCalls, calls: list[tuple[str, dict[str, object]]], places: list[int], is_live: bool, before: str
) -> None:
    texts = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    before = "" if form.is_bare else before
    found = read(form, cut(before + (form.write(texts) if texts else ""), places), is_live=is_live)
    assert found.calls == texts
    assert found.content == (before.rstrip() if texts else before)


@given(form=FORMS, text=FRAGMENTS, places=PLACES, is_live=st.booleans())
def test_any_text_at_all_is_read_the_same_however_it_is_cut(
    form: JsonCalls, text: str, places: list[int], is_live: bool
) -> None:
    whole = read(form, [text], is_live=is_live)
    assert read(form, cut(text, places), is_live=is_live) == whole
    assert read(form, list(text), is_live=is_live) == whole
    if not is_live:
        assert whole.calls or whole.content == text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": "a"}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        (HERMES, "<tool_call>\nadd(1, 2)\n</tool_call>"),
        (HERMES, "a <tool_call"),
        (HERMES, 'So {"name": "add", "arguments": {}}'),
        (HERMES, '{"name": "add"}'),
        (HERMES, '```json\n{"answer": 1}\n```'),
        (HERMES, '```json\n{"name": "add"}\n```'),
        (HERMES, '```python\n{"name": "add", "arguments": {}}\n```'),
        (HERMES, "```js"),
        (HERMES, "``"),
        (HERMES, '{"name": "Ann", "arguments": {}}'),
        (HERMES, "{{ name }}"),
        (HERMES, '{{"answer": 1}}'),
        (LLAMA3, '{"answer": 5}'),
        (LLAMA3, 'It is {"name": "add", "parameters": {}}'),
        (LLAMA3, '<|python_tag|>brave_search.call(query="x")'),
        (MISTRAL, '[TOOL_CALLS][{"name": "nobody", "arguments": {}}]'),
        (MISTRAL, "[TOOL_CALLS] nothing"),
    ],
)
def test_a_malformed_call_is_content_and_nothing_of_it_is_lost(form: JsonCalls, text: str) -> None:
    assert read(form, [text]) == Read(text)
    assert read(form, list(text)) == Read(text)


@pytest.mark.parametrize(
    ("form", "text", "content", "num_calls"),
    [
        (HERMES, 'So:\n<tool_call>{"arguments": {}, "name": "add"}</tool_call>\nDone.', "So:Done.", 1),
        (HERMES, '<tool_call>\n{"name": "add"}\n</tool_call>\n', "", 1),
        (HERMES, '<tool_call>{"name": "add", "arguments": {}} and on', "and on", 1),
        (HERMES, '<tool_call>{bad</tool_call><tool_call>{"name": "add"}</tool_call>', "<tool_call>{bad</tool_call>", 1),
        (HERMES, '<tool_call>\n{"name": "add"}\n</tool', "", 1),
        (HERMES, '{"name": "add", "arguments": {}}\n{"name": "add", "arguments": {}}', "", 2),
        (HERMES, '```json\n{\n  "name": "add",\n  "arguments": {}\n}\n```', "", 1),
        (HERMES, '```\n{"name": "add", "arguments": {}}\n```\nDone.', "Done.", 1),
        (HERMES, '```json\n{"name": "add", "arguments": {}}\n``', "", 1),
        (
            HERMES,
            '```json\n{"name": "add", "arguments": {}}\n```\n```json\n{"name": "add", "arguments": {}}\n```',
            "",
            2,
        ),
        # As the template of Qwen2.5-Coder shows calls, and as its models of 1.5 B write them.
        (HERMES, '<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call>', "", 1),
        (HERMES, '{{"name": "add", "arguments": {}}}\n{{"name": "add", "arguments": {}}}\ndone', "done", 2),
        (HERMES, '{{"arguments": {}, "name": "add"}}', "", 1),
        (MISTRAL, '{"name": "add", "arguments": {}}', "", 1),
        (LLAMA3, ' {"name": "add", "parameters": {}}\n{"name": "add", "parameters": {}}', "", 2),
        (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}', "", 2),
        (MISTRAL, 'Well [TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]', "Well", 2),
        (MISTRAL, '[TOOL_CALLS]{"name": "add", "arguments": {}}', "", 1),
    ],
)
def test_models_may_be_careless_about_what_stands_around_calls(
    form: JsonCalls, text: str, content: str, num_calls: int
) -> None:
    found = read(form, [text])
    assert (found.content, len(found.calls)) == (content, num_calls)


def test_arguments_that_a_grammar_guarantees_come_as_they_are_written() -> None:
    parser = reader_of(HERMES)
    assert parser.push('<tool_call>\n{"name": "add", "argum') == []
    assert parser.push('ents": {"a"') == [CallBegun(0, "add"), CallArguments(0, '{"a"')]
    assert parser.push(': "}') == [CallArguments(0, ': "}')]
    assert parser.push('"}}\n</tool') == [CallArguments(0, '"}')]
    assert parser.flush() == []


def test_broken_arguments_are_given_as_they_were_written_and_end_where_they_are_no_json() -> None:
    for text, arguments in (
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>', '{"a": 1}'),
        ('<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>', '{"a": }'),
        ('<tool_call>\n{"name": "add", "arguments": {"a": "', '{"a": "'),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1</tool_call>', '{"a": 1'),
    ):
        assert read(HERMES, [text]) == read(HERMES, list(text)) == Read("", [("add", arguments)])


def test_a_call_in_a_loop_of_brackets_ends_and_takes_no_time() -> None:
    text = '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 50_000
    assert read(HERMES, [text]).calls[0][0] == "add"


def test_an_answer_in_json_is_not_held_back_once_it_can_be_no_call() -> None:
    for form in FORMATS.values():
        parser = reader_of(form)
        assert parser.push(' { "na') == []
        assert "".join(piece.text for piece in parser.push('ture": 1')) == ' { "nature": 1'


def test_nothing_follows_the_last_call_that_is_wanted() -> None:
    text = HERMES.write([("add", "{}"), ("add", "{}")])
    assert read(HERMES, list("A " + text + " B"), most_calls=1) == Read("A", [("add", "{}")])
