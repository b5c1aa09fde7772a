"""Formats of models whose marks are tokens: found from a chat template, and read by those tokens alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from card.text.parts.families import kept_ends
from card.text.parts.view import ModelAnswers
from card.text.tokenizer import Tokenizer
from tests.text.parts.reading import Read, put_together
from tests.text.parts.test_answers_of_families import ATEM, DSML, M3, TOOLS
from tests.tokenizer_kinds import byte_level

TEMPLATES = Path(__file__).parent / "templates"
ROLE, MESSAGE = "<|role_sep|>\n", "<|message_sep|>\n\n"
GIGACHAT = (TEMPLATES / "GigaChat3-10B-A1.8B.jinja").read_text("utf-8")
# Chat template, tokens, the end of a prompt, what the model writes behind it, and what is in that.
MODELS: list[tuple[str, str, list[str], str, str, Read]] = [
    (
        "gigachat3",
        GIGACHAT,
        [ROLE, MESSAGE],
        f"assistant{ROLE}",
        f'A function call{MESSAGE}function call{ROLE}{{"name": "rm", "arguments": {{"p": "/"}}}}{MESSAGE}',
        Read("A function call", [("rm", '{"p": "/"}')]),
    ),
    (
        "minimax-m3",
        f"{M3}<invoke name= tools </mm:think>",
        [M3, "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"],
        "ai\n<mm:think>",
        f'a</mm:think>{M3}<tool_call>\n{M3}<invoke name="rm">{M3}<p>/{M3}</p>{M3}</invoke>\n{M3}</tool_call>',
        Read("", [("rm", '{"p": "/"}')], "a"),
    ),
    (
        "deepseek-v4",
        (TEMPLATES / "deepseek-ai-DeepSeek-V4.jinja").read_text("utf-8"),
        [DSML, "<think>", "</think>"],
        "</think>",
        f'<{DSML}tool_calls>\n<{DSML}invoke name="rm">\n<{DSML}parameter name="p" string="true">/</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}tool_calls>",
        Read("", [("rm", '{"p": "/"}')]),
    ),
    (
        "minimax-m1",
        (TEMPLATES / "MiniMax-M1.jinja").read_text("utf-8"),
        [],
        "ai name=assistant\n",
        "<think>a</think>Hi",
        Read("Hi", [], "a"),
    ),
    (
        "kimi-k3",
        "<|open|> <|close|> 'tools'",
        ["<|open|>", "<|close|>", "<|sep|>"],
        "<|open|>response<|sep|>",
        "Hi<|close|>response<|sep|><|close|>message<|sep|>",
        Read("Hi"),
    ),
    (
        "kimi-k3",
        "<|open|> <|close|> 'tools'",
        ["<|open|>", "<|close|>", "<|sep|>"],
        "<|open|>think<|sep|>",
        "a<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>",
        Read("Hi", [], "a"),
    ),
    (
        "apriel-1.6",
        (TEMPLATES / "Apriel-1.6-15b-Thinker-fixed.jinja").read_text("utf-8"),
        ["[BEGIN FINAL RESPONSE]"],
        "Here are my reasoning steps:\n",
        "a\n[BEGIN FINAL RESPONSE]\nHi",
        Read("Hi", [], "a"),
    ),
    (
        "hunyuan3",
        "'</think{}>'.format(':opensource') '<tool_sep{}>' tools",
        ["<think:opensource>", "</think:opensource>"],
        "<think:opensource>",
        "a</think:opensource>Hi",
        Read("Hi", [], "a"),
    ),
    (
        "muse",
        "<atem:invoke <|message|> <|start|> tools",
        ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"],
        "<|start|>assistant",
        f" to=self<|message|>a<|eom|><|start|>assistant to=add<|message|>{ATEM}<|eot|>",
        Read("", [("add", "{}")], "a"),
    ),
]


def tokenizer_of(template: str, tokens: list[str]) -> Tokenizer:
    tokenizer = byte_level()
    core = tokenizer.backend_tokenizer
    assert core is not None
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(("form", "template", "tokens", "prompt", "text", "parts"), MODELS, ids=[m[0] for m in MODELS])
def test_marks_that_are_tokens_are_read_as_those_tokens(
    form: str, template: str, tokens: list[str], prompt: str, text: str, parts: Read
) -> None:
    tokenizer = tokenizer_of(template, tokens)
    answers = ModelAnswers(tokenizer)
    assert answers.form.name == form
    view = answers.view(tokenizer.encode(prompt, add_special_tokens=False), TOOLS)
    reader = view.reader()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert {token for token in tokens if token in text} == {
        view.names[view.token_marks[i]] for i in ids if i in view.token_marks
    }
    pieces = [p for i in ids for p in reader.push(view.token_marks.get(i) or tokenizer.decode([i]))]
    assert put_together([*pieces, *reader.flush()]) == parts


def test_a_token_ends_a_message_and_not_the_answer_only_where_its_format_is() -> None:
    assert kept_ends(["<|eot|>", "<|eom|>", "<|message|>"]) == {"<|eom|>"}
    assert not kept_ends(["<|eot|>", "<|eom|>"]), "as in Llama 4, where both end an answer"
