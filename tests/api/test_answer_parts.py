"""Parts are a view: with thoughts, calls and grammars behind them texts stay those of plain decoding."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from card.api.answer_stream import AnswerStream
from card.api.llm import LLM
from card.api.outputs import AnswerText
from card.config import Grammar, SamplingParams
from card.errors import SettingsError
from card.models.demo import demo_folder
from card.models.loading import load_tokenizer
from card.text.chat_template import render_chat
from card.text.parts.formats import FORMATS
from card.text.parts.leads import Lead, put_behind
from card.text.parts.pieces import Content, Said, Thoughts
from card.text.parts.view import ModelAnswers, texts_of
from card.text.template_files import with_templates
from tests.server.scripted import scripted_bytes
from tests.text.parts.test_answers_of_families import ANSWERS, OPENED, TOOLS
from tests.tokenizer_kinds import byte_level

pytestmark = pytest.mark.timeout(240)
PROMPTS = ["A farmer has 12 cows.", "Anna buys 3 apples", "Dan has $40.", "There are 7 birds"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(demo_folder("target"))


def test_texts_with_thoughts_and_a_grammar_behind_them_are_those_of_plain_decoding_in_a_batch() -> None:
    pytest.importorskip("llguidance")
    form = FORMATS["hermes"]
    ids = {"<think>": 700, "</think>": 701}  # tokens of the demo model that stand for the marks
    schema = Grammar("json_schema", '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}')
    grammar = put_behind(Lead(form, ids, "thoughts", budget=9), schema)
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=seed, grammar=grammar)
        for seed, temperature in enumerate([0.0, 0.0, 1.0, 1.0])
    ]
    with LLM("demo-target", dtype="float32", method="vanilla", max_num_seqs=1) as llm:
        alone = [llm.generate(prompt, one)[0].outputs[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert all(701 in output.token_ids[:10] for output in alone), "the budget closes the thoughts"
    for method in ("card", "suffix"):
        draft = "demo-draft" if method == "card" else None
        with LLM("demo-target", draft, dtype="float32", method=method, policy="fixed", max_num_seqs=4) as llm:
            together = llm.generate(PROMPTS, params)
        assert [one.outputs[0].token_ids for one in together] == [output.token_ids for output in alone]


def test_a_view_changes_no_token_and_a_mark_that_is_spelled_out_is_none() -> None:
    scripts = {"say": ["<think>", "I ", "quote <thi", "nk> and </th", "ink>.", "</think>", "Yes", "."]}
    model = scripted_bytes(scripts, "{# </think> #}{{ messages[-1].content }}", ("<think>", "</think>"))
    asked = [{"role": "user", "content": "say"}]
    with LLM(model.model, tokenizer=model.tokenizer, method="vanilla") as llm:
        plain = llm.chat(asked, SamplingParams(max_tokens=30, temperature=0.0))[0].outputs[0]
        chunks = list(llm.stream(asked, SamplingParams(max_tokens=30, temperature=0.0), reads_parts=True))
    assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == plain.token_ids
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    assert "".join(one.text for one in pieces if isinstance(one, Thoughts)) == "I quote <think> and </think>."
    assert "".join(one.text for one in pieces if isinstance(one, Content)) == "Yes."
    assert sum(sum(chunk.thinks) for chunk in chunks) == 6


def test_calls_of_the_given_tools_are_pieces_of_a_stream() -> None:
    call = '<tool_call>{"name": "rm", "arguments": {"p": "/"}}</tool_call>'
    model = scripted_bytes({"say": ["Well", call]}, "{# </think> tools <tool_call> #}{{ messages[-1].content }}")
    asked, tools = [{"role": "user", "content": "say"}], [{"type": "function", "function": {"name": "rm"}}]
    params = SamplingParams(max_tokens=30, temperature=0.0)
    with LLM(model.model, tokenizer=model.tokenizer, method="vanilla") as llm:
        for given, said in ((tools, Said("Well", "", [("rm", '{"p": "/"}')])), (None, Said("Well" + call))):
            chunks = list(llm.stream(asked, params, tools=given, reads_parts=True))
            assert Said.by(piece for chunk in chunks for piece in chunk.pieces) == said


def test_an_unknown_format_is_one_line_with_the_list() -> None:
    with pytest.raises(SettingsError, match=r"must be auto or one of none, think, hermes, .*, got 'gpt5'$"):
        LLM("demo-target", answer_format="gpt5")


def test_a_template_that_nobody_recognises_is_one_text_and_a_warning(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = copy(tokenizer)
    own.chat_template = "{% if tools %}<other>{% endif %}{{ messages }}"
    answers = ModelAnswers(own)
    assert "of no family that is known here" in caplog.text and not answers.has_parts({"a": {}})
    assert ModelAnswers(own, "qwen3-coder").has_parts({"a": {}})


def test_a_view_without_special_tokens_streams_as_the_text_comes(tokenizer: Any) -> None:
    answers = ModelAnswers(tokenizer, "hermes")
    stream = AnswerStream(tokenizer, answers.view([5]), after=[5])
    found = AnswerText()
    for token_id in tokenizer.encode("<think>Hm\n</think>\n\nYes.", add_special_tokens=False):
        found += stream.take([token_id], is_end=False)
    found += stream.take([], is_end=True)
    assert (found.text == "Yes." and found.pieces[0] == Thoughts("H")) or found.pieces[0].text.startswith("H")


def test_templates_of_files_take_the_place_of_the_models_own(tokenizer: Any, tmp_path: Path) -> None:
    chat, tools = tmp_path / "chat.jinja", tmp_path / "tools.jinja"
    chat.write_text("chat {{ messages[0].content }}", "utf-8")
    tools.write_text("tools {{ messages[0].content }}", "utf-8")
    own = with_templates(tokenizer, str(chat), str(tools))
    assert own.get_chat_template() == chat.read_text("utf-8")
    assert own.get_chat_template(tools=[{}]) == tools.read_text("utf-8")
    assert tokenizer.get_chat_template() != own.get_chat_template(), "the given tokenizer may serve others"
    with LLM("demo-target", dtype="float32", method="vanilla", chat_template=str(chat)) as llm:
        answer = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1))[0]
    assert list(answer.prompt_token_ids) == tokenizer.encode("chat Hi", add_special_tokens=False)
    with pytest.raises(SettingsError, match="nowhere"):
        LLM("demo-target", dtype="float32", method="vanilla", chat_template=str(tmp_path / "nowhere"))


def test_documents_reach_the_template(tokenizer: Any) -> None:
    own = copy(tokenizer)
    own.chat_template = "{% for d in documents or [] %}{{ d.text }} {% endfor %}{{ messages[0].content }}"
    asked = [{"role": "user", "content": "Hi"}]
    assert render_chat(own, asked, template_kwargs={"documents": [{"text": "One."}]}) == "One. Hi"
    assert render_chat(own, asked) == "Hi"


@pytest.fixture(scope="module")
def thinking() -> Iterator[LLM]:
    model = scripted_bytes(
        {"say": ["<think>So", " it is", "</think>", "Yes", "."]}, "{# </think> #}{{ messages[-1].content }}"
    )
    with LLM(model.model, tokenizer=model.tokenizer, method="vanilla") as llm:
        yield llm


def test_a_stop_string_that_is_the_mark_of_a_part_ends_no_answer() -> None:
    model = scripted_bytes(
        {"say": ["<think>", "So", "</think>", "Yes", "."]},
        "{# </think> #}{{ messages[-1].content }}",
        ("<think>", "</think>"),
    )
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("</think>", "<think>"))
    with LLM(model.model, tokenizer=model.tokenizer, method="vanilla") as llm:
        chunks = list(llm.stream([{"role": "user", "content": "say"}], params, reads_parts=True))
    assert "".join(chunk.text for chunk in chunks) == "Yes."


@functools.cache
def marked(form: str) -> tuple[Any, ModelAnswers, list[str]]:
    """Return a tokenizer of bytes whose added tokens are a format's marks, its answers, and the marks."""
    marks = sorted(
        {mark.strip() for text in texts_of(FORMATS[form]) for mark in re.findall(r"[<\[][^<\[\s]+[>\]]", text)}
    )
    tokenizer = byte_level()
    core = tokenizer.backend_tokenizer
    assert core is not None
    core.add_tokens([AddedToken(mark, special=idx % 2 == 0, normalized=False) for idx, mark in enumerate(marks)])
    return tokenizer, ModelAnswers(tokenizer, form), marks


@pytest.mark.parametrize(("form", "text"), OPENED)
def test_a_mark_within_an_argument_is_its_name(form: str, text: str) -> None:
    tokenizer, answers, marks = marked(form)
    view = answers.view([5], TOOLS)
    for mark in marks:
        stream = AnswerStream(tokenizer, view, after=[5])
        ids = tokenizer.encode(f"{text}a {mark} b", add_special_tokens=False)
        ((name, arguments),) = Said.by(stream.take(ids, is_end=True).pieces).calls
        assert name == "rm" and arguments.startswith('{"p": "a')
        arguments.encode()
        if mark in view.names.values() and arguments.endswith(" b"):  # others end the argument
            assert json.loads(arguments + '"}') == {"p": f"a {mark} b"}


@given(
    form=st.sampled_from(sorted(FORMATS)),
    picks=st.lists(st.integers(0, 99), max_size=10),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    stop=st.sampled_from([(), ("\n",), ("rm", "}")]),
)
def test_tokens_make_the_same_parts_whatever_comes_together_and_no_mark_becomes_an_odd_character(
    form: str, picks: list[int], sizes: list[int], stop: tuple[str, ...]
) -> None:
    tokenizer, answers, marks = marked(form)
    whole = [text for name, _, text, _ in ANSWERS if name == form]
    texts = [*whole, *(text[: len(text) // 2] for text in whole), *marks, *marks, "\n", " ", "x", '"', "}", "\u6587"]
    ids = tokenizer.encode("".join(texts[pick % len(texts)] for pick in picks), add_special_tokens=False)

    def taken(steps: Iterator[int]) -> AnswerText:
        stream, place, found = AnswerStream(tokenizer, answers.view([5], TOOLS), stop, after=[5]), 0, AnswerText()
        read = ids[: 1 + next((idx for idx, one in enumerate(ids) if stream.feed(one)), len(ids))] if stop else ids
        while place < len(read):
            step = next(steps)
            found += stream.take(read[place : place + step], is_end=False)
            place += step
        return found + stream.take([], is_end=True)

    at_once, apart = taken(itertools.repeat(len(ids) + 1)), taken(itertools.cycle(sizes))
    assert (at_once.text, at_once.thinks) == (apart.text, apart.thinks)
    said = Said.by(at_once.pieces)
    assert said == Said.by(apart.pieces) and said.content == at_once.text
    "".join([said.content, said.thoughts, *itertools.chain(*said.calls)]).encode()


def test_stop_strings_end_the_content_at_their_token(thinking: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("it", "es"))
    chunks = list(thinking.stream([{"role": "user", "content": "say"}], params, reads_parts=True))
    assert "".join(chunk.text for chunk in chunks) == "Y"
    assert chunks[-1].finish_reason == "stop" and chunks[-1].stats.num_new_tokens == 4
