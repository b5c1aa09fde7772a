"""Anthropic's API: blocks, events, tools, errors and keys, as Claude Code and Anthropic's clients have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from card.server.anthropic.schemas import MessagesRequest
from card.server.bodies import fitted
from card.server.strict import Ignored
from tests.server.running import PROMPT, Running, Solo, serving
from tests.server.scripted import scripted_bytes, served
from tests.server.test_parts import THINKING, THINKING_TEMPLATE

pytestmark = pytest.mark.timeout(240)

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
RM: dict[str, Any] = {
    "name": "rm",
    "description": "Removes a file.",
    "input_schema": {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]},
}
PIXEL = "iVBORw0KGgo="


@pytest.fixture(scope="module")
def thinker() -> Iterator[Running]:
    """Serve a model that thinks between tags, as Qwen 3 does."""
    yield from served(scripted_bytes(THINKING, THINKING_TEMPLATE))


def asked(content: Any, **fields: Any) -> dict[str, Any]:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"model": "any", "messages": messages, "max_tokens": 40, "temperature": 0, **fields}


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; the name of each is its type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's events make, as Anthropic's clients put them together."""
    message = told[0]["message"]
    assert told[0]["type"] == "message_start" and message["content"] == [] and message["stop_reason"] is None
    assert told[-1]["type"] == "message_stop"
    arguments = ""
    for one in told[1:-1]:
        if one["type"] == "content_block_start":
            assert one["index"] == len(message["content"])
            message["content"].append(one["content_block"])
            arguments = ""
        elif one["type"] == "content_block_delta":
            kind, *_ = one["delta"]["type"].split("_delta")
            if kind == "input_json":
                arguments += one["delta"]["partial_json"]
            else:
                message["content"][one["index"]][kind] += one["delta"][kind]
        elif one["type"] == "content_block_stop":
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(arguments)
        else:
            message.update(one["delta"])
            message["usage"].update(one["usage"])
    return dict(message)


def answer(server: Running, content: Any, **fields: Any) -> dict[str, Any]:
    """Return an answer, which must be the same streamed and not."""
    response = server.post(PATH, asked(content, **fields))
    assert response.status_code == 200, response.text[:400]
    whole: dict[str, Any] = response.json()
    streamed = joined(events(server.post(PATH, asked(content, stream=True, **fields)).text))
    for name in ("type", "role", "model", "stop_reason", "stop_sequence"):
        assert streamed[name] == whole[name]
    told = [[{k: v for k, v in one.items() if k != "id"} for one in each["content"]] for each in (whole, streamed)]
    assert told[0] == told[1]
    assert sum(streamed["usage"].values()) == sum(whole["usage"].values())
    return whole


def test_a_text_is_plain_decodings_and_usage_tells_what_was_read_before(server: Running, solo: Solo) -> None:
    text = solo(f"<|user|>{PROMPT}<|end|><|assistant|>", 12)
    first = answer(server, PROMPT, max_tokens=12)
    assert first["content"] == [{"type": "text", "text": text}] and first["stop_reason"] == "max_tokens"
    assert (first["id"][:4], first["type"], first["role"]) == ("msg_", "message", "assistant")
    usage = answer(server, PROMPT, max_tokens=12)["usage"]
    assert usage["output_tokens"] == 12 and usage["cache_read_input_tokens"] > 0
    counted = server.post(COUNT, {"model": "any", "messages": [{"role": "user", "content": PROMPT}]}).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_thoughts_are_a_block_before_the_text(thinker: Running) -> None:
    told = answer(thinker, "plain", thinking={"type": "enabled", "budget_tokens": 1024})
    thoughts = {"type": "thinking", "thinking": "I see.\nReally", "signature": ""}
    assert told["content"] == [thoughts, {"type": "text", "text": "No.\nYes"}]
    assert told["stop_reason"] == "end_turn"


def test_thoughts_are_sent_back_and_the_template_reads_them() -> None:
    template = THINKING_TEMPLATE.replace(
        "{{ messages", "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}{{ messages"
    )
    for thinker in served(scripted_bytes(THINKING, template)):
        first = answer(thinker, "calls", tools=[RM])["content"]
        assert [block["type"] for block in first] == ["thinking", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": first[1]["id"], "content": "plain"}
        told = [{"role": "user", "content": "calls"}, {"role": "assistant", "content": first}]
        told.append({"role": "user", "content": [result]})
        assert answer(thinker, told, tools=[RM])["content"][-1]["text"] == "No.\nYes"
        counts = []
        for sent in (first, first[1:]):
            told[1] = {"role": "assistant", "content": sent}
            counts.append(thinker.post(COUNT, {"model": "any", "messages": told, "tools": [RM]}).json()["input_tokens"])
        assert counts[0] - counts[1] == len("Go"), "a byte is a token"


def test_a_call_is_a_block_with_its_input(thinker: Running) -> None:
    told = answer(thinker, "calls", tools=[RM])
    assert told["stop_reason"] == "tool_use"
    thoughts, call = told["content"]
    assert thoughts["thinking"] == "Go" and call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "rm", "input": {"p": "a/b"}}


def test_a_stop_sequence_is_named(thinker: Running, server: Running) -> None:
    told = answer(thinker, "plain", stop_sequences=["nope", "\n"])
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "\n")
    assert told["content"][-1]["text"] == "No."
    text = answer(server, PROMPT, max_tokens=20)["content"][0]["text"]
    told = answer(server, PROMPT, max_tokens=20, stop_sequences=[text[6:9]])
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", text[6:9])
    assert told["content"][0]["text"] == text[:6]


def test_a_form_of_the_text_is_held(thinker: Running) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    told = answer(thinker, "json", output_config={"format": form, "effort": "max"})
    assert json.loads(told["content"][-1]["text"]) == {"a": 7}


BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "zz"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "rm", "input": {"p": "a"}},
            {"type": "tool_use", "id": "t2", "name": "rm", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "done"}]},
            {"type": "tool_result", "tool_use_id": "t2", "content": "no file", "is_error": True},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}, "title": "T"},
            {"type": "text", "text": "Go on"},
        ],
    },
]


def test_blocks_become_the_messages_that_a_template_reads() -> None:
    chat = fitted(asked(BLOCKS, tools=[RM], system=[{"type": "text", "text": "Be brief."}]), MessagesRequest).as_chat()
    told = [(one.role, one.content) for one in chat.messages]
    assert told == [
        ("system", "Be brief."),
        ("user", "Look"),
        ("assistant", "I look."),
        ("tool", "done"),
        ("tool", "Error: no file"),
        ("user", "T\nD\nGo on"),
    ]
    turn = chat.messages[2]
    assert turn.reasoning_content == "Hm."
    assert [(call.id, call.function.arguments) for call in turn.tool_calls] == [("t1", '{"p":"a"}'), ("t2", "{}")]
    assert [one.tool_call_id for one in chat.messages[3:5]] == ["t1", "t2"]


def test_what_the_system_says_on_the_way_is_a_reminder_in_the_users_turn() -> None:
    late = {"role": "system", "content": [{"type": "text", "text": "Be quick."}]}
    told = "<system-reminder>\nBe quick.\n</system-reminder>"
    chat = fitted(asked([{"role": "user", "content": "Go"}, late]), MessagesRequest).as_chat()
    assert [(one.role, one.content) for one in chat.messages] == [("user", f"Go\n{told}")]
    chat = fitted(
        asked([*BLOCKS[:2], BLOCKS[2] | {"content": BLOCKS[2]["content"][:2]}, late]), MessagesRequest
    ).as_chat()
    assert (chat.messages[-1].role, chat.messages[-1].content) == ("user", told), "behind the results of calls"


def test_images_of_messages_and_of_results_reach_the_model() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a shot"}, image]}
    turns = [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
    chat = fitted(asked([*turns, {"role": "user", "content": [result]}]), MessagesRequest).as_chat()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    assert [one.content for one in chat.messages] == [[shown, {"type": "text", "text": "What?"}], "a shot", [shown]]


def test_the_line_that_differs_in_each_request_costs_no_prefix(server: Running) -> None:
    def system(mark: str) -> list[dict[str, Any]]:
        line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={mark};"
        return [{"type": "text", "text": line}, {"type": "text", "text": "You are brief. " * 8}]

    first = answer(server, PROMPT, system=system("00000"), max_tokens=4)
    second = answer(server, PROMPT, system=system("f3a91"), max_tokens=4)
    assert first["content"] == second["content"]
    assert second["usage"]["input_tokens"] == 1, "all but the last token was read before"
    whole = answer(server, PROMPT, system=system("1")[0]["text"] + "\n" + system("1")[1]["text"], max_tokens=4)
    assert whole["usage"]["input_tokens"] == 1, "as one text, too"


CHOICES: list[tuple[Any, Any, bool | None]] = [
    ({"type": "auto"}, "auto", None),
    ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ({"type": "any"}, "required", None),
    ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
    ({"type": "none"}, "none", None),
]


@pytest.mark.parametrize(("given", "expected", "parallel"), CHOICES)
def test_choices_of_tools(given: Any, expected: Any, parallel: bool | None) -> None:
    chat = fitted(asked("x", tools=[RM], tool_choice=given), MessagesRequest).as_chat()
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)


def test_a_tool_can_be_named() -> None:
    chat = fitted(asked("x", tools=[RM], tool_choice={"type": "tool", "name": "rm"}), MessagesRequest).as_chat()
    assert not isinstance(chat.tool_choice, str) and chat.tool_choice.function.name == "rm"


@pytest.mark.parametrize(
    ("thinking", "switch", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, True, 2048),
        ({"type": "adaptive"}, True, None),
        ({"type": "disabled"}, False, None),
    ],
)
def test_whether_to_think_reaches_the_template(thinking: Any, switch: bool, budget: int | None) -> None:
    chat = fitted(asked("x", thinking=thinking), MessagesRequest).as_chat()
    assert (chat.chat_template_kwargs["enable_thinking"], chat.thinking_budget) == (switch, budget)


def test_tools_of_their_makers_servers_are_left_out_and_named(server: Running) -> None:
    others = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    response = server.post(PATH, asked(PROMPT, tools=[RM, *others], context_management={}, max_tokens=4))
    assert response.status_code == 200
    said = response.headers["x-card-ignored"].split(", ")
    assert said == ["context_management", "tools.web_search_20250305", "tools.bash_20250124"]
    ignored = Ignored()
    assert [one.name for one in fitted(asked("x", tools=[RM, *others]), MessagesRequest, ignored).tools] == ["rm"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "assistant", "content": "So"}]}, "the last message must be the user's"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "blocks must be of type text, image"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "do not belong"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    ({"tool_choice": {"type": "tool"}}, "that type needs it"),
    ({"tool_choice": {"type": "any"}}, "needs tools"),
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"system": 3}, "system"),
]


@pytest.mark.parametrize(("fields", "told"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_requests_are_refused_in_the_apis_own_form(server: Running, fields: dict[str, Any], told: str) -> None:
    response = server.post(PATH, asked(PROMPT) | fields)
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert told in body["error"]["message"] and "\n" not in body["error"]["message"]


def test_other_errors_have_that_form_too(server: Running) -> None:
    for response, status, kind in (
        (server.post(PATH, b"{"), 400, "invalid_request_error"),
        (server.client.get(PATH), 405, "invalid_request_error"),
        (server.client.get(f"{PATH}/batches"), 404, "not_found_error"),
        (server.post(PATH, b"x" * 5_000_000), 413, "request_too_large"),
        (server.post(PATH, asked("word " * 20_000)), 400, "invalid_request_error"),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == kind
    long = server.post(PATH, asked("word " * 20_000)).json()["error"]["message"]
    assert "maximum context length" in long


def test_a_key_may_stand_in_either_header(server: Running) -> None:
    with serving(server.llm, api_keys=("sesame",)) as guarded:
        for headers, status in (
            ({"x-api-key": "sesame"}, 200),
            ({"Authorization": "Bearer sesame"}, 200),
            ({"x-api-key": "other"}, 401),
            ({}, 401),
        ):
            response = guarded.post(PATH, asked(PROMPT, max_tokens=2), headers=headers)
            assert response.status_code == status
            if status == 401:
                assert response.json()["error"]["type"] == "authentication_error"


def test_a_model_of_another_name_is_answered_for_and_said(server: Running) -> None:
    response = server.post(PATH, asked(PROMPT, max_tokens=2) | {"model": "claude-opus-4-8"})
    assert response.headers["x-card-model"] == response.json()["model"] == "demo-target"


def test_an_error_on_the_way_is_the_last_event(server: Running) -> None:
    with serving(server.llm, request_timeout_s=0.2) as hasty:
        body = asked(PROMPT, stream=True, max_tokens=900, temperature=2.0) | {"seed": 1}
        told = events(hasty.post(PATH, body).text)
    assert told[0]["type"] == "message_start"
    assert told[-1]["type"] == "error" and told[-1]["error"]["type"] == "overloaded_error"
    assert "0.2 s" in told[-1]["error"]["message"]


def test_silence_is_broken_by_the_apis_own_event(server: Running) -> None:
    with serving(server.llm, ping_interval_s=1e-4) as restless:
        told = events(restless.post(PATH, asked(PROMPT * 30, stream=True, max_tokens=2)).text)
    assert {"type": "ping"} in told
    assert joined([one for one in told if one["type"] != "ping"])["stop_reason"] == "max_tokens"
