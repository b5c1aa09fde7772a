"""An error that ends a stream names the fields of its request, as one before the first byte does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from card.errors import GrammarError, SettingsError, named
from card.server.generation import Generation
from tests.server.running import Running

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPENAI_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
RESPONSE_FORM = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
ASKED: dict[str, tuple[str, dict[str, Any], str, str]] = {  # path, body, its fields for a length and for a form
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": OPENAI_FORM},
        "max_tokens",
        "response_format",
    ),
    "completion": ("/v1/completions", {"prompt": "a", "guided_regex": "[a-z]"}, "max_tokens", "guided_regex"),
    "gbnf": ("/v1/completions", {"prompt": "a", "grammar": 'root ::= "a"'}, "max_tokens", "grammar"),
    "response": ("/v1/responses", {"input": "a", "text": RESPONSE_FORM}, "max_output_tokens", "text.format"),
    "message": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "max_tokens",
        "output_config.format",
    ),
    "ollama": ("/api/chat", {"messages": MESSAGES, "format": SCHEMA}, "options.num_predict", "format"),
}


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("error", [SettingsError, GrammarError])
def test_an_error_within_a_stream_names_the_fields_of_its_request(
    server: Running, monkeypatch: pytest.MonkeyPatch, kind: str, error: type[Exception]
) -> None:
    async def fails(self: Generation) -> AsyncGenerator[Any, None]:
        raise error(f"{named('max_tokens')}, {named('grammar')}: no")
        yield

    monkeypatch.setattr(Generation, "events", fails)
    path, body, length, form = ASKED[kind]
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200
    assert f"{length}, {form}: no" in answer.text
    assert '"param"' not in answer.text or f'"param":"{form if error is GrammarError else length}"' in answer.text
