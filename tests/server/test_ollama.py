"""Ollama's API: the same answers as at OpenAI's paths, as lines of JSON or as one object."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from card.api.async_llm import AsyncLLM
from card.errors import WorkerError
from card.models.demo import demo_folder
from card.server.generation import Generation
from card.server.ollama.answers import LineStream
from card.server.ollama.schemas import OllamaMessage, chat_messages
from tests.server.running import PROMPT, Running, Solo, serving
from tests.server.scripted import scripted_bytes, served
from tests.server.test_parts import RM, SCHEMA, THINKING, THINKING_TEMPLATE
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES = [{"role": "user", "content": PROMPT}]
SHORT = {"num_predict": 6, "temperature": 0}
FINAL = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    """Serve a model that thinks between tags and calls functions."""
    yield from served(scripted_bytes(THINKING, THINKING_TEMPLATE))


def whole(server: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    response = server.post(path, {**body, "stream": False})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def lines(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of an answer as it comes by default."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(one) for one in response.text.splitlines()]


def spoken(server: Running, script: str, **fields: Any) -> dict[str, Any]:
    """Return the final object and the joined message of an answer, which is the same streamed and not."""
    options = {"num_predict": 40, "temperature": 0, **fields.pop("options", {})}
    body = {"messages": [{"role": "user", "content": script}], "options": options, **fields}
    answer = whole(server, CHAT, body)
    *pieces, last = lines(server, CHAT, body)
    assert [piece["done"] for piece in pieces] == [False] * len(pieces) and last["done"] is True
    told = [piece["message"] for piece in (*pieces, last)]
    assert {message["role"] for message in told} == {"assistant"}
    for name in ("content", "thinking"):
        assert "".join(message.get(name, "") for message in told) == answer["message"].get(name, "")
    calls = [call["function"] for message in told for call in message.get("tool_calls", ())]
    assert calls == [call["function"] for call in answer["message"].get("tool_calls", ())]
    assert (last["done_reason"], last["eval_count"]) == (answer["done_reason"], answer["eval_count"])
    return answer


def test_a_conversation_has_the_answer_that_it_has_at_openais_path(server: Running) -> None:
    ours = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}).json()
    asked = {"model": "demo-target:latest", "messages": MESSAGES, "options": SHORT}
    answer = whole(server, CHAT, asked)
    assert answer["message"] == {"role": "assistant", "content": ours["choices"][0]["message"]["content"]}
    assert answer["model"] == "demo-target:latest" and answer["created_at"].endswith("Z")
    assert (answer["done"], answer["done_reason"]) == (True, "length")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (ours["usage"]["prompt_tokens"], 6)
    assert all(answer[name] > 0 for name in FINAL - {"load_duration"})
    pieces = lines(server, CHAT, asked)
    assert "".join(one["message"]["content"] for one in pieces) == answer["message"]["content"]
    assert pieces[-1].keys() >= FINAL and not any(FINAL & one.keys() for one in pieces[:-1])


def test_a_prompt_goes_through_the_template_unless_it_is_raw(server: Running, solo: Solo) -> None:
    raw = {"prompt": PROMPT, "raw": True, "options": SHORT}
    assert whole(server, GENERATE, raw)["response"] == solo(PROMPT, 6)
    assert "".join(one["response"] for one in lines(server, GENERATE, raw)) == solo(PROMPT, 6)
    system = {"role": "system", "content": "Be brief."}
    chatted = whole(server, CHAT, {"messages": [system, *MESSAGES], "options": SHORT})
    answer = whole(server, GENERATE, {"prompt": PROMPT, "system": "Be brief.", "options": SHORT})
    assert answer["response"] == chatted["message"]["content"]
    assert answer["prompt_eval_count"] == chatted["prompt_eval_count"] and "message" not in answer


def test_options_mean_what_they_mean_at_openais_path(server: Running) -> None:
    options = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7, "num_predict": 12}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["\n\n"]}
    same = {**options, "repetition_penalty": options["repeat_penalty"], "max_tokens": options["num_predict"]}
    del same["repeat_penalty"], same["num_predict"]
    ours = server.post("/v1/chat/completions", {"messages": MESSAGES, **same}).json()
    answer = whole(server, CHAT, {"messages": MESSAGES, "options": options})
    assert answer["message"]["content"] == ours["choices"][0]["message"]["content"]
    drawn = {"temperature": 2.0, "num_predict": 12, "seed": -1}
    texts = {whole(server, CHAT, {"messages": MESSAGES, "options": drawn})["message"]["content"] for _ in range(4)}
    assert len(texts) > 1, "a negative seed is none"
    cut = whole(server, GENERATE, {"prompt": PROMPT, "raw": True, "options": {"temperature": 0, "stop": [" "]}})
    assert " " not in cut["response"].strip() and cut["done_reason"] == "stop"


@pytest.mark.parametrize("num_predict", [-1, -2, 0])
def test_no_bound_is_no_bound(thinker: Running, num_predict: int) -> None:
    answer = spoken(thinker, "plain", options={"num_predict": num_predict})
    assert (answer["message"]["content"], answer["done_reason"]) == ("No.\nYes", "stop")


def test_what_nothing_reads_is_left_aside_and_named(server: Running) -> None:
    options = {**SHORT, "num_ctx": 8192, "num_thread": 4, "mirostat": 0}
    response = server.post(CHAT, {"messages": MESSAGES, "options": options, "keep_alive": "5m", "truncate": True})
    assert response.status_code == 200, response.text
    assert set(response.headers["x-card-ignored"].split(", ")) == {"num_ctx", "num_thread", "mirostat", "truncate"}
    other = server.post(CHAT, {"model": "llama3.2", "messages": MESSAGES, "options": SHORT, "stream": False})
    assert other.json()["model"] == other.headers["x-card-model"] == "demo-target"


def test_thoughts_are_apart_from_the_content(thinker: Running) -> None:
    answer = spoken(thinker, "plain", think=True)
    assert answer["message"] == {"role": "assistant", "thinking": "I see.\nReally", "content": "No.\nYes"}
    generated = whole(thinker, GENERATE, {"prompt": "plain", "options": {"temperature": 0}})
    assert (generated["thinking"], generated["response"]) == ("I see.\nReally", "No.\nYes")


def test_think_reaches_the_template(demo_llm: AsyncLLM) -> None:
    template = "{{ 'calls' if enable_thinking is defined and not enable_thinking else messages[-1].content }}"
    model = scripted_bytes({"plain": ["A"], "calls": ["B"], "high": ["C"]}, template + "{# </think> #}")
    llm = AsyncLLM(model.model, tokenizer=model.tokenizer, method="vanilla")
    with serving(llm) as running:
        told = [
            spoken(running, "plain", **one)["message"]["content"] for one in ({}, {"think": True}, {"think": False})
        ]
        assert told == ["A", "A", "B"]
        assert running.post(CHAT, {"messages": MESSAGES, "think": "hard"}).status_code == 400
    asyncio.run(llm.shutdown())


def test_a_call_comes_whole_with_its_arguments_as_an_object(thinker: Running) -> None:
    answer = spoken(thinker, "calls", tools=[RM])
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "rm", "arguments": {"p": "a/b"}} and call["id"]
    assert (answer["message"]["content"], answer["message"]["thinking"]) == ("", "Go")
    assert answer["done_reason"] == "stop"


def test_a_call_that_is_cut_off_is_no_call(thinker: Running) -> None:
    for num_tokens in (4, 5):
        answer = spoken(thinker, "calls", tools=[RM], options={"num_predict": num_tokens})
        assert answer["done_reason"] == "length" and "tool_calls" not in answer["message"], answer
    assert answer["message"]["content"] == '{"name": "rm", "arguments": {"p": "a/b'


def test_the_answer_keeps_to_its_format(server: Running, thinker: Running) -> None:
    for form in ("json", SCHEMA):
        answer = spoken(thinker, "json", format=form)
        assert json.loads(answer["message"]["content"]) == {"a": 7}
    for body in ({"prompt": PROMPT}, {"prompt": PROMPT, "raw": True}):
        form = {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        unholdable = {**form, "not": {"required": ["b"]}}  # left to the model, as there
        answer = whole(server, GENERATE, {**body, "format": unholdable, "options": {"temperature": 0}})
        assert list(json.loads(answer["response"])) == ["ok"]
    wrong = server.post(CHAT, {"messages": MESSAGES, "format": {"type": "string", "pattern": "("}})
    assert wrong.status_code == 400 and "format" in wrong.json()["error"] and "strict" not in wrong.json()["error"]


def test_log_probabilities_are_those_of_the_content(thinker: Running) -> None:
    answer = spoken(thinker, "plain", logprobs=True, top_logprobs=2)
    assert [one["token"] for one in answer["logprobs"]][:3] == ["\nNo", ".\n", "Yes"]
    assert {len(one["top_logprobs"]) for one in answer["logprobs"]} == {2}
    body = {"prompt": "plain", "raw": True, "logprobs": True, "options": {"temperature": 0, "num_predict": 2}}
    assert [one["token"] for one in whole(thinker, GENERATE, body)["logprobs"]] == ["<thi", "nk>I "]
    streamed = [one for piece in lines(thinker, GENERATE, body) for one in piece.get("logprobs", ())]
    assert [one["token"] for one in streamed] == ["<thi", "nk>I "]


def test_results_of_functions_name_the_calls_that_they_answer() -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": name}}, **more}

    turns = [
        {"role": "assistant", "thinking": "Both.", "tool_calls": [call("f"), call("g"), call("f", id="own")]},
        {"role": "tool", "tool_name": "g", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "tool_name": "f", "content": "3"},
        {"role": "assistant", "tool_calls": [call("f")]},
        {"role": "tool", "tool_call_id": "theirs", "content": "4"},
        {"role": "user", "content": "?", "images": ["QUJD", "data:image/png;base64,QUJE"]},
    ]
    told = chat_messages([OllamaMessage.model_validate(turn) for turn in turns])
    first, second = told[0]["tool_calls"], told[4]["tool_calls"]
    assert [one["function"]["arguments"] for one in first] == ['{"x":"f"}', '{"x":"g"}', '{"x":"f"}']
    assert [one["id"] for one in (*first, *second)] == ["call00000", "call00001", "own", "call00003"]
    assert [one["tool_call_id"] for one in (*told[1:4], told[5])] == ["call00001", "call00000", "own", "theirs"]
    assert told[0]["reasoning_content"] == "Both." and told[1]["name"] == "g"
    urls = [part["image_url"]["url"] for part in told[6]["content"][:2]]
    assert urls == ["data:;base64,QUJD", "data:image/png;base64,QUJE"] and told[6]["content"][2]["text"] == "?"


def test_a_conversation_with_results_is_answered(thinker: Running, server: Running) -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "rm", "arguments": {"p": "a"}}}]}
    turns = [{"role": "user", "content": "x"}, called, {"role": "tool", "tool_name": "rm", "content": "gone"}]
    for one, last in ((thinker, [{"role": "user", "content": "plain"}]), (server, [])):
        answer = whole(one, CHAT, {"messages": [*turns, *last], "tools": [RM], "options": SHORT})
        assert answer["done"] is True
    image = {"role": "user", "content": "See.", "images": ["QUJD"]}
    refused = server.post(CHAT, {"messages": [image]})
    assert refused.status_code == 400 and "images" in refused.json()["error"]


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload")])
def test_without_a_question_the_model_is_there(server: Running, keep_alive: object, reason: str) -> None:
    for path, body, key in ((CHAT, {"messages": []}, "message"), (GENERATE, {}, "response")):
        response = server.post(path, {**body, "model": "demo-target", "keep_alive": keep_alive})
        assert response.status_code == 200
        assert (response.json()["done"], response.json()["done_reason"]) == (True, reason) and key in response.json()


def test_the_model_is_listed_and_described(server: Running, thinker: Running) -> None:
    for path in ("/api/tags", "/api/ps"):
        listed = server.client.get(path).json()["models"]
        assert [one["name"] for one in listed] == ["demo-target:latest", "other-name:latest"]
        files = [demo_folder("target") / name for name in ("config.json", "model.safetensors")]
        assert {one["size"] for one in listed} == {sum(file.stat().st_size for file in files)}
        assert {len(one["digest"]) for one in listed} == {64}
        details = listed[0]["details"]
        assert [details[name] for name in ("format", "family", "quantization_level")] == [
            "safetensors",
            "llama",
            "BF16",
        ]
        assert server.client.head(path).status_code == 200
    for body in ({"model": "demo-target:latest"}, {"name": "other-name"}):
        shown = server.post("/api/show", body).json()
        assert shown["capabilities"] == ["completion", "tools"]
        figures = shown["model_info"]
        assert figures[f"{figures['general.architecture']}.context_length"] == server.llm.max_model_len
        assert shown["details"]["parameter_size"] == "15.3M" and "<|" in shown["template"]
    assert thinker.post("/api/show", {"model": "scripted"}).json()["capabilities"] == [
        "completion",
        "tools",
        "thinking",
    ]
    missing = server.post("/api/show", {"model": "llama3.2"})
    assert missing.status_code == 404 and "llama3.2" in missing.json()["error"]
    major, minor, _ = server.client.get("/api/version").json()["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6), "clients refuse what is older"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": MESSAGES, "options": {"temperature": -1}}, "options.temperature"),
    (CHAT, {"messages": MESSAGES, "options": {"num_predict": "6"}}, "options.num_predict"),
    (CHAT, {"messages": MESSAGES, "options": {"mirostat": 2}}, "mirostat"),
    (CHAT, {"messages": MESSAGES, "format": "xml"}, "format"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 10000}]}, "maximum context length"),
    (CHAT, {"messages": [{"role": "system", "content": "x", "images": ["QUJD"]}]}, "images"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools.0"),
    (GENERATE, {"prompt": PROMPT, "template": "{{ .Prompt }}!"}, "template"),
    (GENERATE, {"prompt": PROMPT, "context": [1, 2]}, "context"),
    (GENERATE, {"prompt": PROMPT, "raw": True, "system": "x"}, "raw"),
    (GENERATE, {"prompt": PROMPT, "suffix": " three"}, "no marks for a gap"),
    (GENERATE, {"prompt": PROMPT, "suffix": " three", "system": "x"}, "suffix"),
]


@pytest.mark.parametrize(("path", "body", "told"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_request_is_told_what_is_wrong_in_ollamas_form(
    server: Running, path: str, body: dict[str, Any], told: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert answer.json().keys() == {"error"} and told in answer.json()["error"], answer.text


def test_errors_of_every_layer_have_ollamas_form(server: Running) -> None:
    refused = [
        (server.post(CHAT, b"{"), 400),
        (server.client.post(CHAT, content="{}", headers={"Content-Type": "text/plain"}), 415),
        (server.client.get("/api/nothing"), 404),
        (server.client.get(CHAT), 405),
        (server.client.get("/api/tags", headers={"Host": "evil.example"}), 421),
        (server.client.get("/api/tags", headers={"Origin": "http://evil.example"}), 403),
    ]
    for answer, status in refused:
        assert answer.status_code == status and isinstance(answer.json()["error"], str), answer.text
        assert int(answer.headers["content-length"]) == len(answer.content)
    assert refused[3][0].headers["allow"] == "POST"
    assert isinstance(server.client.get("/v1/nothing").json()["error"], dict), "OpenAI's paths have theirs"


def test_keys_limits_and_strictness_are_those_of_the_other_paths(server: Running) -> None:
    with serving(server.llm, api_keys=("secret",), max_request_tokens=4, strict_fields=True) as guarded:
        key = {"Authorization": "Bearer secret"}
        for path in ("/api/tags", "/api/version"):
            assert guarded.client.get(path).status_code == 401 and guarded.client.get(path, headers=key).is_success
        asked = {"messages": MESSAGES, "options": {"num_predict": 4, "temperature": 0}, "stream": False}
        refused = guarded.post(CHAT, asked)
        assert refused.status_code == 401 and isinstance(refused.json()["error"], str)
        assert refused.headers["www-authenticate"] == "Bearer"
        assert guarded.post(CHAT, {**asked, "model": "demo-target:latest"}, headers=key).status_code == 200
        assert guarded.post(CHAT, {**asked, "model": "another"}, headers=key).status_code == 404
        assert guarded.post(CHAT, {**asked, "truncate": True}, headers=key).status_code == 400
        more = guarded.post(CHAT, {**asked, "options": {"num_predict": 5}}, headers=key)
        assert more.status_code == 400 and "options.num_predict" in more.json()["error"]


def test_a_name_with_a_tag_is_served_under_it(server: Running) -> None:
    with serving(server.llm, served_model_names=("small:latest", "large:7b"), strict_fields=True) as tagged:
        names = [one["name"] for one in tagged.client.get("/api/tags").json()["models"]]
        assert names == ["small:latest", "large:7b"]
        for name, status in (*((name, 200) for name in names), ("small", 404), ("large:latest", 404)):
            assert tagged.post("/api/show", {"model": name}).status_code == status
            answer = tagged.post(CHAT, {"model": name, "messages": MESSAGES, "options": SHORT, "stream": False})
            assert answer.status_code == status and answer.json().get("model", name) == name


def test_a_client_that_leaves_ends_its_answer(server: Running) -> None:
    with server.client.stream("POST", CHAT, json={"messages": MESSAGES}) as response:
        assert json.loads(next(response.iter_lines()))["done"] is False
    until(server.is_idle)


def test_a_full_queue_is_told_with_the_time_to_come_back(server: Running) -> None:
    with serving(server.llm, max_num_queued_reqs=0) as small:
        most = server.llm.host.settings.max_num_seqs
        endless = {"messages": MESSAGES, "options": {"temperature": 0}}
        with ThreadPoolExecutor(most) as threads:
            busy = [threads.submit(small.client.post, CHAT, json=endless) for _ in range(most)]
            until(lambda: small.service.gate.num_requests == most or any(one.done() for one in busy))
            answer = small.post(CHAT, endless)
            assert all(one.result().status_code == 200 for one in busy)
    assert answer.status_code == 429 and "queue is full" in answer.json()["error"]
    assert int(answer.headers["retry-after"]) >= 1


def send_into(told: bytearray, stream: LineStream) -> None:
    """Send the bytes of a stream."""

    async def send(message: Message) -> None:
        told.extend(message.get("body", b""))

    asyncio.run(stream.stream_response(send))


def test_silence_is_blanks_before_a_line_and_a_failure_the_last_line() -> None:
    told = bytearray()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b'{"done":false}\n'
        while b"  " not in told:
            await asyncio.sleep(0.001)
        raise WorkerError("the engine is down")

    async def close() -> None:
        pass

    arrival = SimpleNamespace(deadline=contextlib.nullcontext())
    generation = SimpleNamespace(arrival=arrival, ping_interval_s=0.001, close=close)
    send_into(told, LineStream(cast(Generation, generation), events()))
    first, last, rest = told.split(b"\n")
    assert b"  " in last and rest == b""
    assert json.loads(first) == {"done": False} and json.loads(last) == {"error": "the engine is down"}
