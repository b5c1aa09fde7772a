"""What takes long holds nobody up: prompts of megabytes, and grammars that are never compiled."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from card.api.host import Prompt
from card.config import Grammar
from card.text.grammar import GrammarCompiler
from card.text.matcher import MatcherState
from tests.server.running import PROMPT, Running, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_ITSELF = {"$ref": "#"}


def kept_to(schema: object, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": PROMPT, "max_tokens": 8, "response_format": wanted, **fields}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def refused(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "\n" not in error["message"] and len(error["message"]) < 500
    return error


# ---- grammars -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        _ITSELF,
        {"anyOf": [_ITSELF]},
        {"allOf": [_ITSELF]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"not": {}},
        {"enum": []},
        {"type": "king"},
        {"type": "string", "pattern": "("},
        {"$ref": "https://evil.example/schema"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "#/nowhere"},
        {"$ref": 7},
        {"enum": [f"the number {idx}" for idx in range(100_000)]},
        *map(nested, (300, 450, 700)),
    ],
    ids=lambda schema: str(schema)[:60],
)  # fmt: skip
def test_a_schema_that_cannot_be_kept_to_is_refused_in_plain_words(server: Running, schema: object) -> None:
    error = refused(server.post(_COMPLETIONS, kept_to(schema)))
    assert error["param"] in ("response_format", None), error
    for internal in ("NoExtensionBias", "panic", "Traceback", "RecursionError"):
        assert internal not in error["message"]
    assert server.is_idle()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": _ITSELF}},
        {"anyOf": [_ITSELF, {"type": "integer"}]},
        {"enum": [f"the number {idx}" for idx in range(2000)]},
        *map(nested, (20, 100)),
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_an_odd_schema_that_can_be_kept_to_is_kept_to(server: Running, schema: object) -> None:
    assert server.post(_COMPLETIONS, kept_to(schema)).status_code == 200


@pytest.fixture
def held(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the compiling of grammars that name "slow" never come to an end, until the event is set."""
    is_free, build = threading.Event(), GrammarCompiler.build

    def slow(self: GrammarCompiler, grammar: Grammar) -> MatcherState:
        if "slow" in grammar.source:
            assert is_free.wait(60)
        return build(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "build", slow)
    yield is_free
    is_free.set()


def test_a_grammar_that_takes_for_ever_is_given_up_and_holds_nobody_up(server: Running, held: threading.Event) -> None:
    with serving(server.llm, grammar_timeout_s=0.5) as hasty, ThreadPoolExecutor(8) as pool:
        slow = [kept_to({"enum": [f"slow {idx}"]}) for idx in (0, 0, 1, 2)]
        asked = [pool.submit(hasty.post, _COMPLETIONS, body) for body in slow]
        until(lambda: hasty.llm.host.grammars.is_compiling)
        assert hasty.client.get("/health").status_code == 200
        assert hasty.post(_COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
        quick = server.post(_COMPLETIONS, kept_to({"enum": ["quick"]}))  # the same compiler, and more patience
        assert quick.status_code == 200
        assert hasty.post("/tokenize", {"prompt": "a" * 20_000}).status_code == 200
        for answer in asked:
            error = refused(answer.result())
            assert (error["code"], error["param"]) == ("grammar_timeout", "response_format")
        refused(hasty.post(_COMPLETIONS, kept_to({"enum": ["slow 3"]})))
        waiting = refused(hasty.post(_COMPLETIONS, kept_to({"enum": ["quicker"]})), 503)
        assert waiting["code"] == "grammar_queue"
        held.set()
        until(lambda: not hasty.llm.host.grammars.is_compiling)
        assert hasty.post(_COMPLETIONS, slow[0]).status_code == 200


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "word " * 500_000
    with monkeypatch.context() as patch:
        patch.setattr(server.llm.host, "encode", lambda prompt: pytest.fail("tokenized"))
        for path, body in (
            (_COMPLETIONS, {"prompt": long}),
            (_CHAT, {"messages": [{"role": "user", "content": long}]}),
            (_CHAT, {"messages": [{"role": "user", "content": long[:100_000]}] * 10}),
        ):
            error = refused(server.post(path, body))
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert str(server.llm.max_model_len) in error["message"]
    refused(server.post(_COMPLETIONS, {"prompt": [5] * 100_000}))
    assert server.post("/tokenize", {"prompt": long[:100_000]}).json()["count"] > server.llm.max_model_len


def test_a_prompt_of_the_longest_tokens_may_fill_the_context(server: Running) -> None:
    vocabulary = server.service.tokenizer.get_vocab()
    longest = max((token for token in vocabulary if token.isascii() and token.isalpha()), key=len)
    room = server.llm.max_model_len - 1
    for num_words in (room // 2, room):
        prompt = longest * num_words
        num_tokens = server.post("/tokenize", {"prompt": prompt}).json()["count"]
        answer = server.post(_COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert answer.status_code == (200 if num_tokens <= room else 400)
    assert server.post(_COMPLETIONS, {"prompt": [5] * room, "max_tokens": 1}).status_code == 200


def test_nobody_waits_for_a_long_prompt_to_be_tokenized(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free, is_held, encode = threading.Event(), threading.Event(), server.llm.host.encode

    def hold(prompt: Prompt) -> tuple[int, ...]:
        if len(prompt) > 16_384:
            is_held.set()
            assert is_free.wait(60)
        return encode(prompt)

    monkeypatch.setattr(server.llm.host, "encode", hold)
    with ThreadPoolExecutor(3) as pool, contextlib.ExitStack() as stack:
        stack.callback(is_free.set)
        asked = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", _COMPLETIONS, json=asked) as streamed:
            lines = streamed.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            answers = [pool.submit(server.post, "/tokenize", {"prompt": "word " * 5000}) for _ in range(3)]
            assert is_held.wait(60)
            assert server.client.get("/health").status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.post(_COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
        assert not any(answer.done() for answer in answers)
        is_free.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3
