"""Fields that clients of other servers send: what nothing reads is left aside and said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.running import Running

PROMPT = "one two"
COMPLETION, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": PROMPT, "max_tokens": 4, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0},
    RESPONSE: {"input": PROMPT, "max_output_tokens": 16, "temperature": 0},
}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
FUNCTION = {"name": "shell", "parameters": {"type": "object", "properties": {}}}


def texts(answer: dict[str, Any]) -> list[str]:
    """Return the texts of an answer of any door."""
    if "output" in answer:
        return [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]


FILLING = [{"role": "user", "content": "two " * 940}]  # most of the context, so that all that fits is little
SENT: list[tuple[str, str, dict[str, Any], list[str]]] = [  # client, door, fields, those that nothing reads
    ("Codex", RESPONSE, {"client_metadata": {"a": "b"}, "store": False, "prompt_cache_key": "k"}, ["client_metadata"]),
    ("Codex", RESPONSE, {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}}, []),
    ("Codex", RESPONSE, {"reasoning": {"effort": "none", "summary": "auto"}, "parallel_tool_calls": False}, []),
    ("Codex", RESPONSE, {"tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}]}, ["tools.web_search"]),
    ("Codex", RESPONSE, {"tools": [{"type": "local_shell"}, {"type": "namespace"}]}, ["tools.local_shell"]),
    ("Agents SDK", RESPONSE, {"include": ["file_search_call.results"], "truncation": "auto"}, []),
    ("opencode", CHAT, {"stream_options": {"include_usage": True}}, []),
    ("Cline", CHAT, {"web_search_options": {}, "prediction_hint": 1}, ["web_search_options", "prediction_hint"]),
    ("aider", CHAT, {"model": "openai/qwen", "extra": {"a": 1}}, ["extra"]),
    ("Continue", CHAT, {"max_tokens": -1, "messages": FILLING}, []),
    ("llama.cpp", CHAT, {"cache_prompt": True, "add_generation_prompt": True}, ["cache_prompt"]),
    ("llama.cpp", CHAT, {"mirostat": 0, "typical_p": 1, "xtc_probability": 0, "dry_multiplier": 0.0}, ["mirostat"]),
    ("llama.cpp", COMPLETION, {"n_probs": 0, "timings_per_token": True}, ["n_probs", "timings_per_token"]),
    ("vLLM", COMPLETION, {"skip_special_tokens": True, "use_beam_search": False}, ["skip_special_tokens"]),
    ("OpenAI", COMPLETION, {"suffix": "", "best_of": 1, "top_p": 0}, []),
    ("LangChain", CHAT, {"n": 1, "logit_bias": {}, "frequency_penalty": 0, "functions": []}, ["functions"]),
]


@pytest.mark.parametrize("door", [COMPLETION, CHAT])
def test_llama_cpps_name_of_the_repetition_penalty_means_the_same(server: Running, door: str) -> None:
    body = BODIES[door] | {"max_tokens": 12, "ignore_eos": True}
    plain = texts(server.post(door, body).json())
    wanted = texts(server.post(door, body | {"repetition_penalty": 5.0}).json())
    assert wanted != plain, "the penalty must matter here"
    for fields in ({}, {"repeat_last_n": -1}, {"repetition_penalty": 5.0}, {"repeat_last_n": 64}):
        answer = server.post(door, body | {"repeat_penalty": 5.0} | fields)
        assert texts(answer.json()) == wanted, fields
        assert ("x-card-ignored" in answer.headers) == (fields.get("repeat_last_n") == 64), fields
    off = {"repeat_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "repeat_last_n": 0}
    assert texts(server.post(door, body | off).json()) == plain, "a look back at no token finds no repetition"
    refused = server.post(door, body | {"repeat_penalty": 1.2, "repetition_penalty": 1.3})
    assert refused.status_code == 400
    wrong = "repeat_penalty is another name of repetition_penalty, got 1.2 and 1.3; leave one out"
    assert refused.json()["error"]["message"] == wrong


@pytest.mark.parametrize(("client", "door", "fields", "ignored"), SENT, ids=lambda value: str(value)[:40])
def test_what_clients_send_is_taken_and_what_nothing_reads_is_said(
    server: Running, client: str, door: str, fields: dict[str, Any], ignored: list[str]
) -> None:
    answer = server.post(door, BODIES[door] | fields)
    assert answer.status_code == 200, answer.text
    said = answer.headers.get("x-card-ignored", "")
    assert [name for name in said.split(", ") if name][: len(ignored)] == ignored
    read = ("tools", "max_tokens", "messages", "top_p")
    plain = server.post(door, BODIES[door] | {k: v for k, v in fields.items() if k in read})
    assert texts(answer.json()) == texts(plain.json())


REFUSED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"suffix": " three"}),
    (COMPLETION, {"use_beam_search": True}),
    (COMPLETION, {"skip_special_tokens": False}),
    (COMPLETION, {"mirostat": 2}),
    (CHAT, {"typ_p": 0.5}),
    (CHAT, {"functions": [FUNCTION]}),
    (CHAT, {"continue_final_message": True}),
    (CHAT, {"lora_request": {"name": "a"}}),
]


@pytest.mark.parametrize(("door", "fields"), REFUSED, ids=str)
def test_what_would_change_the_text_is_refused_by_name(server: Running, door: str, fields: dict[str, Any]) -> None:
    error = server.post(door, BODIES[door] | fields).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(fields)))


def test_a_strict_server_refuses_what_nothing_reads(strict_server: Running) -> None:
    for door, fields, param in (
        (CHAT, {"cache_prompt": True}, "cache_prompt"),
        (CHAT, {"repeat_last_n": 64}, "repeat_last_n"),
        (RESPONSE, {"client_metadata": {}}, "client_metadata"),
        (RESPONSE, {"tools": [{"type": "web_search"}]}, "tools.0"),
        (RESPONSE, {"tools": [{"type": "custom", "name": "x", "format": LARK}]}, "tools.0.format"),
    ):
        answer = strict_server.post(door, BODIES[door] | fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param)
    missing = strict_server.post(CHAT, BODIES[CHAT] | {"model": "another"})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_fields_deep_inside_are_left_aside_too(server: Running) -> None:
    message = {"role": "user", "content": PROMPT, "cache_control": {"type": "ephemeral"}}
    answer = server.post(CHAT, BODIES[CHAT] | {"messages": [message]})
    assert answer.status_code == 200 and answer.headers["x-card-ignored"] == "cache_control"


def test_names_that_matter_in_a_body_are_harmless_inside_a_message(server: Running) -> None:
    turn = {"role": "assistant", "content": "x", "audio": {"id": "a"}, "function_call": {"name": "f", "arguments": ""}}
    asked = {"role": "user", "content": PROMPT}
    answer = server.post(CHAT, BODIES[CHAT] | {"messages": [asked, turn, asked]})
    assert answer.status_code == 200 and answer.headers["x-card-ignored"] == "audio, function_call"


def test_a_name_that_is_not_the_models_is_taken_and_the_right_one_said(server: Running) -> None:
    answer = server.post(CHAT, BODIES[CHAT] | {"model": "gpt-5"})
    assert answer.status_code == 200
    assert answer.headers["x-card-model"] == answer.json()["model"] == "demo-target"
    assert "x-card-model" not in server.post(CHAT, BODIES[CHAT]).headers
    assert server.client.get("/v1/models/gpt-5").status_code == 404, "asked for by name, it is not there"


def test_a_field_is_logged_once_however_often_it_comes(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        server.post(CHAT, BODIES[CHAT] | {"sent_thrice": 1})
    told = [record for record in caplog.records if record.message == "ignored"]
    assert [record.card_fields["field"] for record in told] == ["sent_thrice"]  # type: ignore[attr-defined]


def test_names_of_any_length_and_kind_make_no_header_too_long(server: Running) -> None:
    fields = {f"{'x' * 1000}{i}é\n": 1 for i in range(100)}
    answer = server.post(CHAT, BODIES[CHAT] | fields)
    assert answer.status_code == 200 and len(answer.headers["x-card-ignored"]) < 4096
