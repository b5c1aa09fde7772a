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

from card.api.prompts import Prompt
from card.config import Grammar
from card.server import service
from card.text.compilation import Compilation
from card.text.grammar import GrammarCompiler
from card.text.grammar_sandbox import GivenUpError
from card.text.matcher import MatcherState
from card.text.token_bytes import TokenBytes
from tests.server.running import PATIENCE_S, PROMPT, Running, serving
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
    until(server.is_idle)


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

    def slow(self: GrammarCompiler, grammar: Grammar, num_bytes: int) -> MatcherState:
        if "slow" in grammar.source:
            assert is_free.wait(60)
        return build(self, grammar, num_bytes)

    monkeypatch.setattr(GrammarCompiler, "build", slow)
    yield is_free
    is_free.set()


@contextlib.contextmanager
def grammar_timeout(server: Running, seconds: float) -> Iterator[None]:
    """Let grammars take so many seconds."""
    host = server.llm.host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "settings", host.settings.replace(grammar_timeout_s=seconds))
        yield


def test_a_grammar_that_takes_for_ever_is_given_up_and_holds_nobody_up(server: Running, held: threading.Event) -> None:
    with serving(server.llm) as hasty, ThreadPoolExecutor(8) as pool, grammar_timeout(server, 2.0):
        grammars = hasty.llm.host.grammars
        slow = [kept_to({"enum": [f"slow {idx}"]}) for idx in (0, 0, 1)]
        asked = [pool.submit(hasty.post, _COMPLETIONS, body) for body in slow[:2]]
        until(lambda: grammars.is_compiling)
        assert hasty.client.get("/health").status_code == 200
        assert hasty.post(_COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
        assert hasty.post(_COMPLETIONS, kept_to({"enum": ["quick"]})).status_code == 200
        assert hasty.post("/tokenize", {"prompt": "a" * 20_000}).status_code == 200
        for answer in [*asked, pool.submit(hasty.post, _COMPLETIONS, slow[2])]:
            error = refused(answer.result())
            assert (error["code"], error["param"]) == ("grammar_timeout", "response_format")
        waiting = refused(hasty.post(_COMPLETIONS, kept_to({"enum": ["quicker"]})), 503)
        assert waiting["code"] == "grammar_queue", "a client's own grammars may keep it waiting"
        elsewhere = httpx2.HTTPTransport(local_address="127.0.0.2")
        with httpx2.Client(base_url=hasty.url, transport=elsewhere, timeout=PATIENCE_S) as other:
            assert other.post(_COMPLETIONS, json=kept_to({"enum": ["another one's"]})).status_code == 200
        held.set()
        until(lambda: not grammars.is_compiling)
        assert hasty.post(_COMPLETIONS, slow[0]).status_code == 200


@pytest.mark.parametrize(("keys", "clients"), [((), ["127.0.0.1"] * 2), (("one", "two"), ["one", "two"])])
def test_clients_are_told_apart_by_their_keys_if_there_are_any(
    server: Running, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], clients: list[str]
) -> None:
    seen: list[str] = []
    begin = GrammarCompiler.begin

    def note(self: GrammarCompiler, grammar: Grammar, *, client: str = "", **options: Any) -> Compilation:
        seen.append(client)
        return begin(self, grammar, client=client, **options)

    with serving(server.llm, api_keys=keys) as guarded:
        for key in ("one", "two"):
            with monkeypatch.context() as patch:
                patch.setattr(GrammarCompiler, "begin", note)
                asked = kept_to({"enum": ["whose is it"]})
                guarded.post(_COMPLETIONS, asked, headers={"Authorization": f"Bearer {key}"})
    assert [client for client in seen if client] == clients


_CHAIN = {
    "$ref": "#/$defs/d0",
    "$defs": {
        f"d{idx}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{idx + 1}"}}} for idx in range(1200)
    }
    | {"d1200": {"type": "integer"}},
}
_RULES = 'r6000 ::= "b"\n' + "".join(f'r{idx} ::= "a" r{idx + 1}\n' for idx in reversed(range(6000))) + "root ::= r0"
_TAKES_MINUTES = "root ::= r0\n" + "".join(f'r{idx} ::= "a" r{idx + 1}\n' for idx in range(20_000)) + 'r20000 ::= "b"'


@pytest.mark.parametrize(
    ("path", "field", "form"),
    [
        (_COMPLETIONS, "guided_json", _CHAIN),
        (_COMPLETIONS, "guided_grammar", _RULES),
        (_COMPLETIONS, "response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": _CHAIN}}),
        ("/v1/responses", "text", {"format": {"type": "json_schema", "name": "x", "schema": _CHAIN}}),
    ],
)
def test_a_chain_too_long_for_the_compiler_s_stack_is_refused_and_ends_no_server(
    server: Running, path: str, field: str, form: object
) -> None:
    asked = {"input": PROMPT} if path == "/v1/responses" else {"prompt": PROMPT, "max_tokens": 2}
    error = refused(server.post(path, {**asked, field: form}))
    assert "more than the compiler takes (ended by SIGSEGV); use a simpler one" in error["message"]
    assert server.complete(prompt=PROMPT, max_tokens=2)
    assert server.post(_COMPLETIONS, kept_to({"enum": [f"after {path} {field}"]})).status_code == 200


def test_a_grammar_whose_client_has_hung_up_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Compilation] = []
    leave = GrammarCompiler.leave

    def note(self: GrammarCompiler, work: Compilation) -> None:
        leave(self, work)
        left.append(work)

    monkeypatch.setattr(GrammarCompiler, "leave", note)
    with serving(server.llm) as patient, grammar_timeout(server, 60.0):
        hasty = httpx2.Client(base_url=patient.url, timeout=httpx2.Timeout(PATIENCE_S, read=1.0))
        with hasty, pytest.raises(httpx2.ReadTimeout):
            hasty.post(_COMPLETIONS, json={"prompt": PROMPT, "guided_grammar": _TAKES_MINUTES})
        until(lambda: left)
        assert left[0].is_given_up, "half a minute before its child's time is over"
        until(left[0].future.done)
        # On a busy machine it has not even begun by then.
        assert left[0].future.cancelled() or isinstance(left[0].future.exception(), GivenUpError)


def test_thousands_of_choices_can_be_followed_also_where_one_begins_another(server: Running) -> None:
    choices = [f"{'a' * 90}{idx}" for idx in range(4096)]
    for fields in ({"logit_bias": {}}, {"temperature": 0.0}):
        text = server.text(prompt=PROMPT, max_tokens=200, guided_choice=choices, **fields)
        assert text in choices
    both = {server.text(prompt=PROMPT, guided_choice=["1", "12"], temperature=5.0, seed=seed) for seed in range(20)}
    assert both == {"1", "12"}


@pytest.mark.parametrize(
    "form",
    [
        {"guided_grammar": "root ::= " + "a " * 1_900_000},
        {"guided_grammar": "\n" * 60_000 + "a"},
        {"guided_json": "[" + "[]," * 1_000_000 + "[]]"},
        {"guided_json": {"enum": ["a" * 1000] * 3000}},
        {"guided_choice": ["a" * 900 + str(idx) for idx in range(4096)]},
    ],
    ids=lambda form: next(iter(form)),
)
def test_no_grammar_is_read_where_others_wait_for_it(
    server: Running, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
) -> None:
    monkeypatch.setattr("card.text.compiling.as_lark", lambda source: pytest.fail("converted here"))
    error = refused(server.post(_COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, **form}))
    assert error["param"] == next(iter(form))


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
            assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
            assert str(server.llm.max_model_len) in error["message"]
    refused(server.post(_COMPLETIONS, {"prompt": [5] * 100_000}))
    assert server.post("/tokenize", {"prompt": long[:100_000]}).json()["count"] > server.llm.max_model_len


def test_a_text_far_too_long_is_not_tokenized_whole_where_nothing_bounds_its_tokens(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "token_bytes", lambda tokenizer: TokenBytes(None))
    most, sizes = server.llm.max_model_len, list[int]()
    tokenizer, long = server.service.tokenizer, "word " * 200_000
    encode = tokenizer.encode

    def note(text: str, **options: Any) -> list[int]:
        sizes.append(len(text))
        return list(encode(text, **options))

    with serving(server.llm) as unbounded:
        monkeypatch.setattr(tokenizer, "encode", note)
        for path, body in (
            (_COMPLETIONS, {"prompt": long}),
            (_CHAT, {"messages": [{"role": "user", "content": long}]}),
        ):
            error = refused(unbounded.post(path, body))
            assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    assert len(sizes) == 2
    assert max(sizes) <= 8 * most


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
