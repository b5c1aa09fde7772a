"""Bodies of up to 4 MB, each of a shape that some server, library or model has choked on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 4 * 1024 * 1024
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = '{"role":"user","content":"hi"}'


@dataclass(frozen=True, slots=True)
class Body:
    """A request, and the statuses that may be its answer."""

    name: str
    path: str
    data: bytes
    statuses: tuple[int, ...] = (400,)


def filled(before: str, item: str | bytes, after: str, separator: bytes = b",") -> bytes:
    """Return as many items as a body may have room for."""
    one = item if isinstance(item, bytes) else item.encode()
    head, tail = before.encode(), after.encode()
    count = (MOST_BYTES - len(head) - len(tail)) // (len(one) + len(separator))
    return head + separator.join([one] * count) + tail


def filled_to(count: int, before: str, item: str, after: str) -> bytes:
    """Return so many items."""
    return (before + ",".join([item] * count) + after).encode()


def members(before: str, value: str, after: str, count: int = 330_000) -> bytes:
    """Return an object with many names."""
    return (before + ",".join(f'"{i:x}":{value}' for i in range(count)) + after).encode()[:MOST_BYTES]


def _nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [json.loads(USER)], "max_tokens": 1, **fields}).encode()


def bodies() -> list[Body]:
    """Return all of them."""
    turn, part, function = (
        USER.replace("hi", ""),
        '{"type":"text","text":"a"}',
        '{"type":"function","function":{"name":"f"}}',
    )
    call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
    in_chat = f'{{"messages":[{USER}],"max_tokens":1,'
    in_text = '{"prompt":"a","max_tokens":1,'
    form = '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"properties":{'
    all_told = {"prompt": "a b c", "max_tokens": 2, "n": 64, "logprobs": 20, "echo": True, "shows_tree": True}
    return [
        Body("empty messages", CHAT, filled('{"messages":[', "{}", "]}")),
        Body("99,000 empty messages", CHAT, filled_to(99_000, '{"messages":[', "{}", "]}")),
        Body("empty lists", CHAT, filled('{"messages":[', "[]", "]}")),
        Body("valid messages", CHAT, filled('{"messages":[', turn, "]}")),
        Body("10,000 messages", CHAT, filled_to(10_000, '{"max_tokens":1,"messages":[', turn, "]}")),
        Body("10,000 items", RESPONSES, filled_to(10_000, '{"input":[', turn, "]}")),
        Body("items", RESPONSES, filled('{"input":[', "{}", "]}")),
        Body("unknown fields", CHAT, members(in_chat, "1", "}")),
        Body("190,000 unknown fields", CHAT, members(in_chat, "1", "}", 190_000), (200,)),
        Body("unknown fields of a message", CHAT, members('{"messages":[{', "1", "}]}", 190_000)),
        Body("parts", CHAT, filled('{"messages":[{"role":"user","content":[', part, "]}]}")),
        Body("90,000 parts", CHAT, _part_list(part, 90_000)),
        Body("90,000 parts of responses", RESPONSES, _part_list('{"type":"input_text","text":"a"}', 90_000, "input")),
        Body("parts that are texts", CHAT, filled('{"messages":[{"role":"user","content":[', '"a"', "]}]}")),
        Body("tools", CHAT, filled(in_chat + '"tools":[', function, "]}")),
        Body("empty tools", CHAT, filled(in_chat + '"tools":[', "{}", "]}")),
        Body("tool calls", CHAT, filled('{"messages":[{"role":"assistant","tool_calls":[', call, "]}]}")),
        Body("arguments of a call", CHAT, _arguments("[]", 1_300_000)),
        Body("90,000 lists in arguments", CHAT, _arguments("[]", 90_000)),
        Body("stop strings", COMPLETIONS, filled(in_text + '"stop":[', '"ab"', "]}")),
        Body("one stop string", COMPLETIONS, filled(in_text + '"stop":"', "x", '"}', b""), (200, 400)),
        Body("biases", COMPLETIONS, members(in_text + '"logit_bias":{', "1", "}}", 190_000)),
        Body("metadata", COMPLETIONS, members(in_text + '"metadata":{', '"a"', "}}", 190_000)),
        Body("one name of metadata", COMPLETIONS, filled(in_text + '"metadata":{"a":"', "x", '"}}', b""), (200,)),
        Body("variables of the template", CHAT, members(in_chat + '"chat_template_kwargs":{', "1", "}}", 190_000)),
        Body("prompts", COMPLETIONS, filled('{"prompt":[', '"a"', "]}")),
        Body("2,048 prompts", COMPLETIONS, filled_to(2048, '{"max_tokens":1,"prompt":[', '"a"', "]}"), (400, 429)),
        Body("token ids", COMPLETIONS, filled('{"prompt":[', "5", "]}")),
        Body("ids of text", "/detokenize", filled('{"tokens":[', "5", "]}")),
        Body("words for ids", "/detokenize", filled('{"tokens":[', '"a"', "]}")),
        Body("one long text", COMPLETIONS, filled('{"prompt":"', "word ", '"}', b"")),
        Body("one long text with a rare character", COMPLETIONS, filled('{"prompt":"\U0001f600', "word ", '"}', b"")),
        Body("escapes", COMPLETIONS, filled('{"prompt":"', r"\ud83d\ude00", '"}', b"")),
        Body("backslashes", COMPLETIONS, filled('{"prompt":"', r"\\\"", '"}', b"")),
        Body("one long message", CHAT, filled('{"messages":[{"role":"user","content":"', "a b ", '"}]}', b"")),
        Body("a text to be tokenized", "/tokenize", filled('{"prompt":"', "word ", '"}', b""), (200, 400)),
        Body("messages to be tokenized", "/tokenize", filled('{"messages":[', "{}", "]}")),
        Body("lists in lists", CHAT, filled(in_chat + '"chat_template_kwargs":', "[", "", b"")),
        Body("objects in objects", CHAT, (in_chat + '"metadata":' + _nested(600_000) + "}").encode()),
        Body("a deep schema", CHAT, _chat(tools=[_tool(json.loads(_nested(120)))], tool_choice="required"), (200, 400)),
        Body("a schema of many names", CHAT, members(in_chat + form, "{}", "}}}}}", 90_000)),
        Body("one long number", COMPLETIONS, filled(in_text + '"seed":', "9", "}", b"")),
        Body("long numbers", COMPLETIONS, filled(in_text + '"stop":[', "9" * 4299, "]}")),
        Body("awkward fractions", COMPLETIONS, filled(in_text + '"stop":[', "1.7976931348623157e308", "]}")),
        Body("9,000 awkward fractions", COMPLETIONS, filled_to(9000, '{"prompt":[', "1.7976931348623157e308", "]}")),
        Body("one long fraction", COMPLETIONS, filled(in_text + '"temperature":0.', "3", "}", b"")),
        Body("a great exponent", COMPLETIONS, (in_text + '"temperature":1e' + "9" * 1_000_000 + "}").encode()),
        Body("a long name of a model", COMPLETIONS, filled('{"prompt":"a","model":"', "m", '"}', b""), (200,)),
        Body("a long name of a field", COMPLETIONS, filled('{"prompt":"a","', "m", '":1}', b""), (200,)),
        Body("one name many times", COMPLETIONS, filled('{"max_tokens":1,', '"prompt":"a"', "}"), (200, 400)),
        Body("a long role", CHAT, filled('{"messages":[{"content":"a","role":"', "m", '"}]}', b"")),
        Body("choices", CHAT, filled(in_chat + '"guided_choice":[', '"ab"', "]}")),
        Body("modalities", CHAT, filled(in_chat + '"modalities":[', '"a"', "]}")),
        Body("64 texts with everything told", COMPLETIONS, json.dumps(all_told).encode(), (200, 429)),
        Body("nothing but blanks", COMPLETIONS, b" " * MOST_BYTES),
        Body("no end", CHAT, filled('{"messages":[', USER, ",", b",")),
        Body("bytes that are no text", COMPLETIONS, filled('{"prompt":"', b"\xff", '"}', b"")),
    ]  # fmt: skip


def _tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def _part_list(part: str, count: int, name: str = "messages") -> bytes:
    content = ",".join([part] * count)
    return f'{{"{name}":[{{"role":"user","content":[{content}]}}]}}'.encode()


def _arguments(item: str, count: int) -> bytes:
    inner = json.dumps('{"a":[' + ",".join([item] * count) + "]}")
    call = f'{{"id":"a","type":"function","function":{{"name":"f","arguments":{inner}}}}}'
    return f'{{"max_tokens":1,"messages":[{{"role":"assistant","content":"","tool_calls":[{call}]}}]}}'.encode()
