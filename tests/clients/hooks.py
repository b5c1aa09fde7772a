"""What schemathesis sends where it means to send something valid: fields that fit the schema fit each other as well.

A schema cannot say, for instance, that `min_tokens` is at most `max_tokens`. Without this nearly every request would be
refused before it reached the engine.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import GenerationMode

NUM_TOKENS = 4096  # of the demo pair's vocabulary
GOOD_GUIDES = {"guided_regex": "a+", "regex": "a+", "guided_grammar": 'start: "a"', "grammar": 'start: "a"'}
GOOD_GUIDES |= {"guided_json": '{"enum": [1]}', "json": '{"enum": [1]}'}
GUIDES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE or not isinstance(case.body, dict):
        return
    body = case.body = dict(case.body)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if "messages" in body and not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("max_tokens") == 0:
        body["echo"] = True
    if body.get("min_tokens"):
        wanted = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name)]
        body["min_tokens"] = min([body["min_tokens"], 2, *wanted])
    _agree_on_tools(body)
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % NUM_TOKENS): bias for key, bias in body["logit_bias"].items()}
    _agree(body.get("response_format"))
    _agree((body.get("text") or {}).get("format"), schema="schema")
    _keep_one_guide(body)
    for item in [*(body.get("messages") or ()), *_items(body)]:
        _agree_on_roles(item)
    if case.path == "/tokenize":  # takes one of the two
        body.pop("prompt" if body.get("messages") else "messages", None)
        if not body.get("messages"):
            body["prompt"] = body.get("prompt") or ""


def _items(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a response's input, if it has some."""
    given = body.get("input")
    return given if isinstance(given, list) else []


def _agree(wanted: dict[str, Any] | None, schema: str = "json_schema") -> None:
    """Let a response format have a schema if it is to follow one, and only then."""
    if wanted is None:
        return
    if wanted["type"] != "json_schema":
        wanted.pop(schema, None)
    elif wanted.get(schema) is None:
        wanted["type"] = "json_object"


def _keep_one_guide(body: dict[str, Any]) -> None:
    """Leave one of the fields that hold an answer to a form, and one form in it; none beside tools."""
    form = body.get("structured_outputs") or {}
    for name in [name for name in form if form[name] not in (None, False)][1:]:
        del form[name]
    guides = [name for name in GUIDES if body.get(name)]
    for name in guides[:-1] if not body.get("tools") else guides:
        del body[name]
    if not any(form.values()):
        body.pop("structured_outputs", None)
    for holder in (body, body.get("structured_outputs") or {}):
        for name, good in GOOD_GUIDES.items():
            if holder.get(name):
                holder[name] = good
    if any(body.get(name) for name in (*GUIDES, "tools")):
        body["ignore_eos"] = False


def _agree_on_tools(body: dict[str, Any]) -> None:
    """Give every function a name of its own, and let a choice name one that there is."""
    names = []
    for idx, tool in enumerate(body.get("tools") or ()):
        function = tool.get("function") or tool
        function["name"] = f"f{idx}"
        names.append(function["name"])
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and names:
        (choice.get("function") or choice)["name"] = names[0]
    elif choice is not None and not names:
        body["tool_choice"] = "none"


def _agree_on_roles(message: dict[str, Any]) -> None:
    """Let a message have what its role has."""
    role = message.get("role")
    if role != "assistant":
        message.pop("tool_calls", None)
        if "role" in message and message.get("content") is None:
            message["content"] = "a"
    if role != "tool":
        message.pop("tool_call_id", None)
    for call in [message, *(one.get("function", {}) for one in message.get("tool_calls") or ())]:
        if "arguments" in call:
            call["arguments"] = "{}"
