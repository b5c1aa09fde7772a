"""What a grammar of calls lets pass and what it does not, for every format, on the demo model's tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from card.config import Grammar
from card.errors import SettingsError
from card.models.demo import demo_folder
from card.models.loading import load_tokenizer
from card.server.tool_schemas import FunctionDefinition
from card.server.tools.grammar import ToolGrammar
from card.text.grammar import GrammarCompiler
from card.text.parts.answer_format import AnswerFormat
from card.text.parts.calls import JsonCalls
from card.text.parts.formats import HERMES, LLAMA3, MISTRAL
from card.text.parts.leads import Lead
from tests.shaping import permits

pytest.importorskip("llguidance")
pytestmark = pytest.mark.timeout(180)

END = 0
# Tokens of the demo model that stand for marks here.
TOKENS = {"[TOOL_CALLS]": 1, "<|python_tag|>": 1, "<tool_call>": 1, "</tool_call>": 2}
SCHEMA: Any = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False, "$defs": {"A": {"enum": [1, 2]}}}
FUNCTIONS = [FunctionDefinition(name="add", parameters=SCHEMA, strict=True), FunctionDefinition(name="now")]
GOOD, OTHER, BAD, STRANGER = ("add", '{"a": 1}'), ("now", "{}"), ("add", '{"a": 3}'), ("nobody", "{}")

every_format = pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=["hermes", "llama3", "mistral"])


@functools.cache
def _compiler() -> tuple[GrammarCompiler, Any]:
    tokenizer = load_tokenizer(demo_folder("target"))
    return GrammarCompiler(tokenizer, 4096, (END, 3)), tokenizer


def fits(grammar: Grammar, text: str) -> bool:
    """Return whether a whole answer keeps to a grammar."""
    compiler, tokenizer = _compiler()
    ids = [*tokenizer.encode(text, add_special_tokens=False), END]
    return all(permits(compiler.compile(grammar), [ids], frozenset({END, 3})))


def grammars(
    form: JsonCalls, *, allows_several: bool = True, has_tokens: bool = False, functions: Any = FUNCTIONS
) -> ToolGrammar:
    marks = {mark: TOKENS[mark] for mark in (form.marker, form.closing.strip()) if mark in TOKENS and has_tokens}
    whole = AnswerFormat(name="this", calls=form)
    return ToolGrammar(whole, functions, Lead(whole, marks, None), allows_several=allows_several)


@every_format
def test_forced_calls_are_what_the_format_writes_and_nothing_else(form: JsonCalls) -> None:
    forced = grammars(form).forced()
    for calls in ([GOOD], [OTHER], [GOOD, OTHER, GOOD]):
        assert fits(forced, form.write(calls)), calls
    for calls in ([BAD], [STRANGER], [GOOD, BAD]):
        assert not fits(forced, form.write(calls)), calls
    assert not fits(forced, "Hello")
    assert not fits(forced, "")
    assert not fits(forced, "Hello " + form.write([GOOD]))
    assert not fits(forced, form.write([GOOD]) + "Hello")
    one = grammars(form, allows_several=False).forced()
    assert fits(one, form.write([GOOD])) and not fits(one, form.write([GOOD, OTHER]))


@every_format
def test_a_free_text_may_have_any_words_but_only_good_calls(form: JsonCalls) -> None:
    free = grammars(form).free()
    before = "" if form.is_bare else "Let me see: {x}\n"
    for text in ("", "Hello {there}", before + form.write([GOOD]), before + form.write([GOOD, OTHER])):
        assert fits(free, text), text
    for call in (BAD, STRANGER):
        assert not fits(free, before + form.write([call]))
    one = grammars(form, allows_several=False).free()
    assert fits(one, "Hello") and fits(one, before + form.write([GOOD]))
    assert not fits(one, before + form.write([GOOD, OTHER]))


@every_format
def test_an_answer_may_be_calls_or_fit_a_schema(form: JsonCalls) -> None:
    either = grammars(form).or_json('{"enum": ["forty", 2]}')
    for text in ('"forty"', "2", form.write([GOOD])):
        assert fits(either, text), text
    for text in ("3", "Hello", form.write([BAD])):
        assert not fits(either, text), text


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=["hermes", "mistral"])
def test_where_marks_are_tokens_the_grammar_wants_those(form: JsonCalls) -> None:
    told = form.write([GOOD, OTHER])
    for mark, special in ((form.marker, "<|user|>"), (form.closing.strip(), "<|assistant|>")):
        if mark in TOKENS:
            told = told.replace(mark, special)
    made = grammars(form, has_tokens=True)
    assert fits(made.forced(), told) and fits(made.free(), "Well. " + told)
    assert not fits(made.forced(), form.write([GOOD]))
    for text in (told, form.write([GOOD])):
        assert not fits(made.free(), text.replace("1}", "3}")), "nor do calls whose marks are spelled out get by"


def test_llamas_bare_calls_begin_with_a_brace_and_no_other_text_does() -> None:
    free = grammars(LLAMA3).free()
    assert fits(free, "It is {}") and not fits(free, "{}") and not fits(free, " {}")


def test_a_schema_may_have_what_llguidance_does_not_know_unless_it_is_strict() -> None:
    odd = {**SCHEMA, "properties": {"a": {"enum": [1, 2], "not": {"const": 3}}}}
    for strict in (False, None, True):
        function = FunctionDefinition(name="add", parameters=odd, strict=strict)
        forced = grammars(HERMES, functions=[function]).forced()
        if not strict:
            assert fits(forced, HERMES.write([GOOD]))
        else:
            with pytest.raises(SettingsError, match='Unimplemented keys: \\["not"\\]; correct it or'):
                fits(forced, HERMES.write([GOOD]))


def test_arguments_have_no_white_space_where_their_schema_says_so() -> None:
    schema: Any = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    compact, spaced = '{"a":1,"b":2}', '{"a": 1, "b": 2}'
    for strict in (False, True):
        for said, fitting in ((False, [compact]), (True, [compact, spaced])):
            parameters = {**schema, "x-guidance": {"whitespace_flexible": said}}
            function = FunctionDefinition(name="f", parameters=parameters, strict=strict)
            forced = grammars(HERMES, functions=[function]).forced()
            assert [text for text in (compact, spaced) if fits(forced, HERMES.write([("f", text)]))] == fitting


def test_arguments_that_a_schema_does_not_list_are_not_invented_unless_it_says_that_there_may_be_some() -> None:
    inner: dict[str, Any] = {"type": "object", "properties": {"b": {"const": 1}}}
    for said, may_be_more in (({}, False), ({"additionalProperties": {"const": 1}}, True)):
        listed = {"a": {"$ref": "#/$defs/Inner"}, "c": {"type": "array", "items": {**inner, **said}}}
        schema = {"type": "object", "properties": listed, "$defs": {"Inner": {**inner, **said}}, **said}
        forced = grammars(HERMES, functions=[FunctionDefinition(name="f", parameters=schema, strict=True)]).forced()
        assert fits(forced, HERMES.write([("f", '{"a": {"b": 1}, "c": [{"b": 1}]}')]))
        for more in ('{"a": {"x": 1}}', '{"a": {}, "c": [{"x": 1}]}', '{"a": {}, "x": 1}'):
            assert fits(forced, HERMES.write([("f", more)])) == may_be_more, more
