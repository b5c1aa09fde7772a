"""What answers contain may be sent back as it is: by OpenAI's own client, by gateways, from other servers."""

from __future__ import annotations

from typing import Any

import pytest

from card.server.bodies import fitted
from card.server.response_schemas import ResponsesRequest
from card.server.schemas import ChatRequest
from card.server.tools.support import plain_messages, template_messages
from card.text.parts.formats import HERMES
from tests.server.running import PROMPT, Running

CALL = {"id": "c", "type": "function", "index": 0, "provider_specific_fields": {"a": 1}}
CALL |= {"function": {"name": "f", "arguments": "{}", "parsed_arguments": {}, "provider_specific_fields": {}}}
OUTPUT_TEXT = {"type": "output_text", "text": "yes", "annotations": [{"type": "url_citation"}], "logprobs": [{}]}
REFUSAL = {"type": "refusal", "refusal": "no"}
ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"content": "yes", "refusal": None, "annotations": [], "audio": None, "function_call": None}, "yes"),
    ({"content": "yes", "annotations": [{"type": "url_citation", "url_citation": {"url": "a"}}]}, "yes"),
    ({"content": None, "refusal": "no", "tool_calls": None}, "no"),
    ({"content": "yes", "provider_specific_fields": {"refusal": None, "x": [1]}, "parsed": {"a": 1}}, "yes"),
    ({"content": "yes", "reasoning_content": "hm"}, "yes"),
    ({"content": "yes", "reasoning": "hm"}, "yes"),
    ({"content": [OUTPUT_TEXT, REFUSAL]}, "yes\nno"),
    ({"content": "", "tool_calls": [CALL]}, ""),
]


@pytest.mark.parametrize(("answer", "text"), ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_in_the_history_says_its_text(server: Running, answer: dict[str, Any], text: str) -> None:
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", **answer}, {"role": "user", "content": "a"}]
    fields = fitted({"messages": messages}, ChatRequest)
    assert fields.messages[1].content == text
    plain = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text}, messages[2]]
    counts = []
    for sent in (messages, plain):
        asked = server.post("/v1/chat/completions", {"messages": sent, "max_tokens": 1})
        assert asked.status_code == 200, asked.text
        counts.append(asked.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1] or answer.get("tool_calls")


def test_a_template_sees_what_it_knows_of_an_answer_and_nothing_else() -> None:
    for name in ("reasoning_content", "reasoning"):
        sent = {"role": "assistant", "content": "yes", name: "hm", "annotations": [], "parsed": 1, "tool_calls": [CALL]}
        messages = fitted({"messages": [{"role": "user", "content": "a"}, sent]}, ChatRequest).messages
        function = {"name": "f", "arguments": {}}
        assert template_messages(messages)[1] == {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }
        assert plain_messages(messages, (), HERMES)[1]["reasoning_content"] == "hm"


def test_items_of_other_servers_answers_may_be_part_of_the_input() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"},
        {"type": "message", "role": "assistant", "id": "m", "phase": "final_answer", "content": [OUTPUT_TEXT, REFUSAL]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": None, "caller": None},
    ]
    chat = fitted({"input": items}, ResponsesRequest).as_chat()
    assert [(one.role, one.content) for one in chat.messages] == [("user", "a"), ("assistant", "yes\nno")]
    assert chat.messages[1].tool_calls[0].function.name == "f"


@pytest.mark.parametrize(
    ("path", "name"), [("chat/completions", "max_tokens"), ("chat/completions", "max_completion_tokens"),
                       ("responses", "max_output_tokens"), ("completions", "max_tokens")]
)  # fmt: skip
def test_more_tokens_than_the_context_has_are_as_many_as_it_has(server: Running, path: str, name: str) -> None:
    said: dict[str, Any] = {"completions": {"prompt": PROMPT}, "responses": {"input": PROMPT}}.get(
        path, {"messages": [{"role": "user", "content": PROMPT}]}
    )
    asked = server.post(f"/v1/{path}", {**said, name: 2**31 - 1, "temperature": 0})
    assert asked.status_code == 200, asked.text
