"""Answers as models of the families write them, through every door of a server: chat, streamed, responses, messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running
from tests.server.scripted import scripted_bytes, served
from tests.server.test_part_grammars import WRITTEN
from tests.server.test_parts import parts, spoken
from tests.text.parts.test_answers_of_families import TEMPLATES

pytestmark = pytest.mark.timeout(240)

SCHEMA = {"type": "object", "properties": {"p": {"type": "string"}, "n": {"type": "integer"}}, "required": ["p"]}
ASKED = "{{ messages[-1].content }}"
# By format: the model's own chat template, or what tells it where the licence keeps that away.
FAMILIES = {
    "hermes": "Qwen-Qwen3-0.6B",
    "qwen3-coder": "Qwen3.5-4B",
    "glm4": "GLM-4.6",
    "minimax-m2": "MiniMax-M2",
    "mistral-args": "mistralai-Ministral-3-14B-Reasoning-2512",
    "gemma4": "google-gemma-4-31B-it",
    "seed-oss": "ByteDance-Seed-OSS",
    "granite3": "ibm-granite-granite-3.3-2B-Instruct",
    "apriel-1.6": "Apriel-1.6-15b-Thinker-fixed",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4",
    "lfm2": "List of tools: </think>",
}


def cut(text: str, size: int = 23) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def through_all_doors(server: Running, script: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return thoughts, content and calls of an answer, which must be the same through every door."""
    function = {"name": "rm", "description": "d", "parameters": SCHEMA}
    chat = parts(spoken(server, script, tools=[{"type": "function", "function": function}]))
    found = (chat[0], chat[1] or "", [(name, json.loads(arguments)) for name, arguments in chat[2]])
    asked = {"model": "scripted", "temperature": 0, "max_output_tokens": 40, "input": script}
    told = server.post("/v1/responses", {**asked, "tools": [{"type": "function", **function}]}).json()
    items: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
    for item in told["output"]:
        items[item["type"]].append(item)
    text = [
        "".join(part["text"] for item in items[kind] for part in item["content"]) for kind in ("reasoning", "message")
    ]
    calls = [(item["name"], json.loads(item["arguments"])) for item in items["function_call"]]
    assert (*text, calls) == found
    body = {"model": "scripted", "max_tokens": 40, "temperature": 0, "messages": [{"role": "user", "content": script}]}
    tools = [{"name": "rm", "description": "d", "input_schema": SCHEMA}]
    told = server.post("/v1/messages", {**body, "tools": tools}).json()
    blocks = told["content"]
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    content = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert (thoughts, content, calls) == found
    assert told["stop_reason"] == ("tool_use" if calls else "end_turn")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", FAMILIES)
def test_an_answer_of_a_family_is_the_same_through_every_door(form: str) -> None:
    file: Path = TEMPLATES / f"{FAMILIES[form]}.jinja"
    template = (file.read_text("utf-8") if file.is_file() else FAMILIES[form] + "{% if tools %}{% endif %}") + ASKED
    thoughts, call = WRITTEN[form]
    scripts = {"calling": cut(thoughts + call), "talking": cut(thoughts + "Done: 7.", 19)}
    path = "a\nb" if form == "qwen3-coder" else "a"
    for server in served(scripted_bytes(scripts, template)):
        assert through_all_doors(server, "calling") == ("Hm.", "", [("rm", {"p": path, "n": 3})])
        assert through_all_doors(server, "talking") == ("Hm.", "Done: 7.", [])


def test_the_prompt_has_begun_the_thoughts() -> None:
    template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text("utf-8") + ASKED
    scripts = {"now<think>": ["Short.\n</thi", 'nk>\n\n{"a"', ": 7}"]}
    for server in served(scripted_bytes(scripts, template)):
        assert through_all_doors(server, "now<think>") == ("Short.", '{"a": 7}', [])


def test_solars_answer_does_not_stop_behind_its_thoughts() -> None:
    marks = ("<|think|>", "<|end|>", "<|begin|>", "<|content|>", "<|flush|>", "<|calls|>", "<|tool_calls|>")
    template = "{# <|tool_call:begin|> <|think|> tools #}{{ '<|end|>' if messages[1:] }}" + ASKED
    script = ["<|think|>", "Hm.", "<|end|>", "<|begin|>", "assistant", "<|content|>", "Hello!", "<|flush|>"]
    for server in served(scripted_bytes({"solar": script}, template, marks)):
        assert through_all_doors(server, "solar") == ("Hm.", "Hello!", [])


def test_a_call_of_command_r7b_is_one() -> None:
    marks = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>")
    template = f"{{# {' '.join(marks)} tools #}}" + ASKED
    call = '[\n    {"tool_call_id": "0", "tool_name": "rm", "parameters": {"p": "/"}}\n]'
    script = [marks[0], "Hm", marks[1], marks[2], call, marks[3]]
    for server in served(scripted_bytes({"cohere": script}, template, marks)):
        assert through_all_doors(server, "cohere") == ("Hm", "", [("rm", {"p": "/"})])
