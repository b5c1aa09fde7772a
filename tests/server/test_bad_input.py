"""Whatever is sent, the answer is a clear error of the client's own, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import settings
from tests.server.running import PROMPT, Running, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def refused(response: httpx2.Response, status: int) -> dict[str, Any]:
    """Return the error, which must be in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return dict(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"[1, 2]",
        b"7",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": '
        + b'{"a":' * 50_000
        + b"1"
        + b"}" * 50_000
        + b"}}}",
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        "{}".encode("utf-16"),
    ],
    ids=lambda body: str(body[:40]),
)
def test_a_body_that_is_no_json_request_is_refused(server: Running, body: bytes) -> None:
    refused(server.post(COMPLETIONS, body), 400)
    refused(server.post(CHAT, body), 400)
    assert server.complete(prompt=PROMPT, max_tokens=1)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": {}, "text": "a"}]}]}, "messages.0.content"),
        (CHAT, {"messages": USER, "audio": {}}, "audio"),
        (CHAT, {"messages": USER, "modalities": ["audio"]}, "modalities.0"),
        (CHAT, {"messages": USER, "reasoning_effort": "immense"}, "reasoning_effort"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (CHAT, {"messages": USER, "structured_outputs": {}}, "structured_outputs"),
        (CHAT, {"messages": USER, "structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"messages": USER, "max_tokens": -2}, "max_tokens"),
        (CHAT, {"messages": USER, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (
            CHAT,
            {"messages": USER, "structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs",
        ),
        (CHAT, {"messages": USER, "guided_json": "{"}, "guided_json"),
        (CHAT, {"messages": USER, "guided_regex": "("}, "guided_regex"),
        (CHAT, {"messages": USER, "guided_choice": []}, "guided_choice"),
        (CHAT, {"messages": USER, "guided_grammar": "root ::= ("}, "guided_grammar"),
        (CHAT, {"messages": USER, "guided_grammar": "no grammar"}, "guided_grammar"),
        (CHAT, {"messages": USER, "guided_regex": "a", "guided_choice": ["a"]}, None),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "("}, "guided_regex"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
        (CHAT, {"messages": USER, "best_of": 2}, "best_of"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, None),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": USER, "n": 0}, "n"),
        (CHAT, {"messages": USER, "n": 1.5}, "n"),
        (CHAT, {"messages": USER, "n": True}, "n"),
        (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": USER, "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "grammar": {}}, "grammar"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": {}}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
        (COMPLETIONS, {"prompt": [4096]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
        (COMPLETIONS, {"prompt": [4096], "max_tokens": 0, "echo": True, "logprobs": 1}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, None),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "temperature": -0.1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
        (COMPLETIONS, {"prompt": "a", "min_p": 1}, "min_p"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETIONS, {"prompt": "a", "repeat_penalty": 0}, "repeat_penalty"),
        (COMPLETIONS, {"prompt": "a", "repeat_last_n": -2}, "repeat_last_n"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"4096": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [4096]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        (COMPLETIONS, {"prompt": "a", "speculation": "maybe"}, "speculation"),
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": USER}, None),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_with_its_name(
    server: Running, path: str, fields: dict[str, Any], param: str | None
) -> None:
    assert refused(server.post(path, fields), 400)["param"] == param
    until(server.is_idle)


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "guided_json", "response_format"])
def test_a_schema_of_any_depth_is_no_failure(server: Running, field: str) -> None:
    for depth in (100, 300, 450, 480, 520, 600):
        schema = '{"anyOf":[' * depth + "{}" + "]}" * depth
        whole = {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": "HERE"}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "HERE"}},
        }
        body: dict[str, Any] = {"messages": USER, "max_tokens": 2, field: whole.get(field, "HERE")}
        body |= {"tool_choice": "required"} if field == "tools" else {}
        response = server.post(CHAT, json.dumps(body).replace('"HERE"', schema).encode())
        assert response.status_code in (200, 400), depth


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_a_factor_next_to_nothing_is_no_failure(server: Running, name: str) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 1.0, name: 5e-324}
    assert server.complete(**asked)["usage"]["completion_tokens"] == 4


def test_the_context_is_full_at_its_limit_and_not_before(server: Running) -> None:
    ids = [5] * (server.llm.max_model_len - 2)
    answer = server.complete(prompt=ids, max_tokens=2, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == server.llm.max_model_len
    asked = {"prompt": ids, "ignore_eos": True}
    for most in (3, 2**31 - 1):
        answer = server.complete(**asked, max_tokens=most)
        assert answer["usage"]["completion_tokens"] == 2, "max_tokens is cut to the context"
        assert answer["choices"][0]["finish_reason"] == "length"


def test_the_limit_of_a_server_is_for_what_the_context_leaves_of_a_request(server: Running) -> None:
    with serving(server.llm, max_request_tokens=7) as strict:
        ids = [5] * (server.llm.max_model_len - 2)
        assert strict.complete(prompt=ids, max_tokens=50, ignore_eos=True)["usage"]["completion_tokens"] == 2
        asked = {"prompt": PROMPT, "max_tokens": 50}
        assert "at most 7 on this server, got 50" in refused(strict.post(COMPLETIONS, asked), 400)["message"]
        chat = {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 50}
        told = refused(strict.post("/v1/chat/completions", chat), 400)
        assert told["param"] == "max_completion_tokens" and told["message"].startswith("max_completion_tokens may be")
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            told = refused(strict.post(path, {"input": PROMPT, "max_output_tokens": 50}), 400)
            assert told["param"] == "max_output_tokens" and "at most 7 on this server" in told["message"]


def test_a_grammar_that_cannot_be_used_is_named_as_it_was_sent(server: Running) -> None:
    told = refused(server.post(COMPLETIONS, {"prompt": PROMPT, "guided_regex": "("}), 400)
    assert told["param"] == "guided_regex" and told["message"].startswith("the regex of guided_regex cannot be used: ")


def test_a_completion_that_asks_for_no_length_gets_the_usual_one_or_the_server_s_limit(server: Running) -> None:
    asked = {"prompt": PROMPT, "ignore_eos": True}
    assert server.complete(**asked)["usage"]["completion_tokens"] == 16
    with serving(server.llm, max_request_tokens=7) as strict:
        assert strict.complete(**asked)["usage"]["completion_tokens"] == 7
        assert "at most 7" in refused(strict.post(COMPLETIONS, {**asked, "max_tokens": 16}), 400)["message"]
        told = strict.client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
        assert told["max_tokens"]["default"] == 7


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_gateways_look_for(server: Running) -> None:
    most = server.llm.max_model_len
    full = [5] * most
    for asked, num_new in (({"max_tokens": 7}, 7), ({"max_tokens": 1, "stream": True}, 1)):
        error = refused(server.post(COMPLETIONS, {"prompt": full, **asked}), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(
            f"This model's maximum context length is {most} tokens. However, you requested {most + num_new} tokens "
            f"({most} in the prompt, {num_new} in the completion)."
        )
    scored = {"prompt": [*full, 5], "max_tokens": 0, "echo": True}
    assert refused(server.post(COMPLETIONS, scored), 400)["code"] == "context_length_exceeded"
    long = "a b " * most
    bodies = [(CHAT, {"messages": [{"role": "user", "content": long}]}), ("/v1/responses", {"input": long})]
    for path, body in [*bodies, (COMPLETIONS, {"prompt": long})]:
        error = refused(server.post(path, body), 400)
        assert error["code"] == "context_length_exceeded"
        assert f"Please reduce the length of the {next(iter(body))} or completion." in error["message"]
        assert f"This model's maximum context length is {most} tokens" in error["message"]


def test_an_unknown_model_or_path_is_not_found(server: Running) -> None:
    assert refused(server.client.get("/v1/models/x"), 404)["param"] == "model"
    refused(server.client.get("/v2/models"), 404)
    refused(server.client.get(COMPLETIONS), 405)


@pytest.mark.parametrize("content_type", ["text/plain", "", "multipart/form-data"])
def test_another_content_type_is_refused(server: Running, content_type: str) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    error = refused(server.post(COMPLETIONS, body, headers={"Content-Type": content_type}), 415)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_ten_megabytes_are_too_large_and_the_connection_lives_on(server: Running, is_chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    headers = {"Content-Type": "application/json"}
    content = iter([body[:5_000_000], body[5_000_000:]]) if is_chunked else body
    error = refused(server.client.post(COMPLETIONS, content=content, headers=headers), 413)
    assert "4194304 bytes" in error["message"]
    assert server.complete(prompt=PROMPT, max_tokens=1)


def test_only_the_right_key_opens_the_door(server: Running) -> None:
    with serving(server.llm, api_keys=("secret-one", "secret-two")) as guarded:
        body = {"prompt": PROMPT, "max_tokens": 1}
        for given_key in (
            None,
            "Bearer",
            "Bearer secret",
            "Bearer secret-onex",
            "Basic secret-one",
            "\u00e9",
        ):
            headers = {} if given_key is None else {"Authorization": given_key.encode("utf-8")}
            response = guarded.post(COMPLETIONS, body, headers=headers)
            assert refused(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("secret-one", "secret-two"):
            assert guarded.post(COMPLETIONS, body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert guarded.client.get("/v1/models").status_code == 401
        assert guarded.post("/tokenize", {"prompt": "a"}).status_code == 401
        for path in ("/health", "/health/ready", "/metrics", "/version", "/openapi.json"):
            assert guarded.client.get(path).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "model",
        "prompt",
        "messages",
        "n",
        "stop",
        "logit_bias",
        "response_format",
        "temperature",
        "seed",
        "stream_options",
    ]
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(fields=st.dictionaries(NAMES, JSON, max_size=4), path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize"]))
def test_no_json_at_all_is_the_servers_own_failure(server: Running, fields: dict[str, Any], path: str) -> None:
    response = server.post(path, json.dumps({**fields, "n": 1} if path != "/tokenize" else fields).encode())
    assert response.status_code in (200, 400, 404), response.text
