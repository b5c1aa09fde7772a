"""What other servers do and this one does not is refused in one line; what curl sends as typed is taken."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.running import PROMPT, Running, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

NOT_DONE = {
    "embeddings": ("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings"),
    "reranking": ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"),
    "LoRA": ("/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "card serve": ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/sha256:0"),
}
CASES = [(path, told) for told, paths in NOT_DONE.items() for path in paths]
MESSAGES = [{"role": "user", "content": PROMPT}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": PROMPT, "options": {"num_predict": 2}},
    "/tokenize": {"prompt": PROMPT},
}
OF_CURL = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(("path", "told"), CASES)
def test_what_is_not_done_is_refused_in_one_line_of_the_doors_form(server: Running, path: str, told: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = server.client.request(method, path)
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert answer.status_code == 501 and told in message and "\n" not in message
        assert path.partition("sha")[0].rstrip("/") in message
        assert path.startswith("/api/") or error["code"] == "not_done"


def test_a_client_asks_once_for_what_is_not_done(server: Running) -> None:
    with serving(server.llm) as own, openai.OpenAI(base_url=f"{own.url}/v1", api_key="none") as client:
        with pytest.raises(openai.InternalServerError, match="makes no embeddings"):
            client.embeddings.create(model="demo-target", input="a")
        until(own.is_idle)
        assert own.service.ledger.errors[501] == 1


@pytest.mark.parametrize("path", DOORS)
def test_a_body_is_taken_as_curl_sends_it(server: Running, path: str) -> None:
    content = json.dumps(DOORS[path])
    assert server.client.post(path, content=content, headers=OF_CURL).status_code == 200
    page = {**OF_CURL, "Origin": "http://evil.example"}  # a page may send this type, too, without being asked
    assert server.client.post(path, content=content, headers=page).status_code == 403


def test_a_form_is_no_request(server: Running) -> None:
    answer = server.client.post("/v1/completions", content="prompt=a&max_tokens=2", headers=OF_CURL)
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["error"]["message"]
