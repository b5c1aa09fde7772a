"""Parts are a view: with thoughts, calls and grammars behind them texts stay those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

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
from card.text.parts.pieces import Content, Thoughts
from card.text.parts.view import ModelAnswers
from card.text.template_files import with_templates
from tests.server.scripted import scripted_bytes

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


def test_stop_strings_end_the_content_at_their_token(thinking: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("it", "es"))
    chunks = list(thinking.stream([{"role": "user", "content": "say"}], params, reads_parts=True))
    assert "".join(chunk.text for chunk in chunks) == "Y"
    assert chunks[-1].finish_reason == "stop" and chunks[-1].stats.num_new_tokens == 4
