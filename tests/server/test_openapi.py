"""`/openapi.json` says what is so, and answers have the fields of OpenAI's own types."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from tests.server.running import PROMPT, Running, serving

pytestmark = pytest.mark.timeout(240)

MESSAGES = [{"role": "user", "content": PROMPT}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOL = {"type": "function", "function": FUNCTION}
CALLING = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
SHORT: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "shows_tree": True, "include_metrics": True}


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, **SHORT, "logprobs": True, "top_logprobs": 2}, ChatCompletion),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "n": 2}, ChatCompletion),
        ("/v1/completions", {"prompt": PROMPT, **SHORT, "echo": True, "logprobs": 1}, Completion),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True}, Completion),
        ("/v1/chat/completions", {"messages": MESSAGES, **CALLING, "tools": [TOOL]}, ChatCompletion),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 4, "include_metrics": True}, Response),
        ("/v1/responses", {"input": PROMPT, **CALLING, "tools": [{"type": "function", **FUNCTION}]}, Response),
        ("/v1/models/demo-target", None, Model),
    ],
    ids=str,
)
def test_an_answer_has_the_fields_of_openais(
    server: Running, path: str, body: dict[str, Any] | None, shape: type[BaseModel]
) -> None:
    response = server.client.get(path) if body is None else server.post(path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer.keys() >= {name for name, field in shape.model_fields.items() if field.is_required()}
    for choice in answer.get("choices", ()):
        assert choice.keys() >= {"index", "finish_reason", "logprobs"} | (
            {"text"} if shape is Completion else {"message"}
        )
    told = _operation(server.client.get("/openapi.json").json(), path)["responses"]["200"]["content"]
    assert "application/json" in told


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/tokenize", {"prompt": PROMPT, "return_token_strs": True}, "count max_model_len tokens token_strs"),
        ("/tokenize", {"prompt": ""}, "count max_model_len tokens token_strs"),
        ("/detokenize", {"tokens": [5, 6]}, "prompt"),
        ("/v1/models", None, "object data"),
        ("/health", None, "status"),
        ("/health/ready", None, "status"),
        ("/version", None, "version served_model_name model draft_model method exact target_cost"),
        ("/load", None, "server_load running waiting max_num_seqs max_num_queued_reqs"),
    ],
    ids=str,
)
def test_an_answer_has_these_fields(server: Running, path: str, body: dict[str, Any] | None, names: str) -> None:
    response = server.client.get(path) if body is None else server.post(path, body)
    assert response.status_code == 200, response.text
    assert set(response.json()) == set(names.split())


def test_an_error_has_the_shape_that_is_described(server: Running) -> None:
    for path, status in (("/v1/completions", 400), ("/v1/models/nobody", 404)):
        response = server.post(path, {}) if status == 400 else server.client.get(path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        told = _operation(server.client.get("/openapi.json").json(), path)["responses"][str(status)]
        error = told["content"]["application/json"]["schema"]["properties"]["error"]
        assert set(error["required"]) == set(response.json()["error"])


def test_null_counts_as_left_out_and_is_described_so(server: Running, strict_server: Running) -> None:
    lenient, strict = (
        one.client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
        for one in (server, strict_server)
    )
    assert (lenient["additionalProperties"], strict["additionalProperties"]) == (True, {"type": "null"})
    assert lenient["properties"]["lora"] == {"enum": [[], None]} and "lora" not in strict["properties"]
    models = [one["properties"]["model"]["anyOf"][0] for one in (lenient, strict)]
    assert models[0] == {"type": "string"} and "demo-target" in models[1]["enum"]
    described = server.client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    optional = [name for name in described["properties"] if name not in described["required"]]
    assert "prompt" not in optional and "n" in optional
    kinds = [described["properties"][name] for name in optional]
    assert all({"type": "null"} in kind.get("anyOf", ()) or None in kind.get("enum", ()) for kind in kinds)
    nulls = dict.fromkeys([*optional, "unknown"])
    answer = server.complete(**{**nulls, "prompt": PROMPT, "max_tokens": 4, "temperature": 0})
    assert answer["choices"][0]["text"] == server.text(prompt=PROMPT, max_tokens=4, temperature=0)
    assert server.post("/v1/completions", {"prompt": None}).status_code == 400


def test_null_counts_as_left_out_inside_of_messages_and_tools_too(server: Running) -> None:
    schemas = server.client.get("/openapi.json").json()["components"]["schemas"]
    for name in ("Message", "Tool", "FunctionDefinition", "ToolCall", "InputMessage", "FunctionTool", "StreamOptions"):
        assert schemas[name]["additionalProperties"] is True, name
    message = {"role": "user", "content": PROMPT, "name": None, "tool_calls": None, "unknown": None}
    tool = {"type": "function", "function": {**FUNCTION, "description": None, "strict": None, "unknown": None}}
    answer = server.post("/v1/chat/completions", {"messages": [message], "tools": [tool], "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_the_limits_that_are_described_are_those_of_this_server(server: Running) -> None:
    with serving(
        server.llm, served_model_names=("one", "two"), max_request_tokens=7, max_num_queued_reqs=0, strict_fields=True
    ) as small:
        schemas = small.client.get("/openapi.json").json()["components"]["schemas"]
        most_ids = schemas["TokenId"]["maximum"]
        fields = schemas["CompletionRequest"]["properties"]
        most_texts = fields["n"]["anyOf"][0]["maximum"]
        assert fields["model"]["anyOf"][0]["enum"] == ["one", "two", ""]
        assert fields["max_tokens"]["anyOf"][0]["maximum"] == 7
        assert schemas["ChatRequest"]["properties"]["max_completion_tokens"]["anyOf"][0]["maximum"] == 7
        fitting = {"prompt": [most_ids], "max_tokens": 1, "n": most_texts}
        assert small.post("/v1/completions", fitting).status_code == 200
        for change in ({"prompt": [most_ids + 1]}, {"n": most_texts + 1}, {"max_tokens": 8}):
            assert small.post("/v1/completions", {**fitting, **change}).status_code == 400, change
    fields = server.client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == server.llm.max_model_len - 1


def test_an_empty_grammar_is_described_as_it_is_taken(server: Running) -> None:
    fields = server.client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "minLength" not in str(fields["grammar"]) and fields["guided_grammar"]["anyOf"][0]["minLength"] == 1
    for name, status in (("grammar", 200), ("guided_grammar", 400)):
        asked = {"prompt": PROMPT, "max_tokens": 1, name: ""}
        assert server.post("/v1/completions", asked).status_code == status, name


def test_a_key_is_described_where_one_is_needed(server: Running) -> None:
    assert "securitySchemes" not in server.client.get("/openapi.json").json()["components"]
    with serving(server.llm, api_keys=("secret",)) as guarded:
        told = guarded.client.get("/openapi.json").json()
        assert told["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in told["paths"].items():
            (operation,) = methods.values()
            is_guarded = path.startswith(("/v1/", "/api/")) or path in ("/infill", "/tokenize", "/detokenize")
            assert ("security" in operation) == is_guarded, path


def test_a_method_that_a_path_does_not_have_is_refused_with_those_that_it_has(server: Running) -> None:
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET")):
        response = server.client.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == allowed
        assert set(response.json()) == {"error"}


def test_liveness_and_readiness_are_described_apart(server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    alive, ready = (paths[path]["get"]["responses"]["503"]["description"] for path in ("/health", "/health/ready"))
    assert "restart the process" in alive
    assert "use another server" in ready


def _operation(described: dict[str, Any], path: str) -> dict[str, Any]:
    name = "/v1/models/{model_name}" if path.startswith("/v1/models/") else path
    (operation,) = described["paths"][name].values()
    return dict(operation)
