"""What schemathesis sends where it means to send something valid: fields that fit the schema fit each other as well.

A schema cannot say, for instance, that `min_tokens` is at most `max_tokens`. Without this nearly every request would be
refused before it reached the engine.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import GenerationMode

NUM_TOKENS = 4096  # of the demo pair's vocabulary


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
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % NUM_TOKENS): bias for key, bias in body["logit_bias"].items()}
    _agree(body.get("response_format"))
    if case.path == "/tokenize":  # takes one of the two
        body.pop("prompt" if body.get("messages") else "messages", None)
        if not body.get("messages"):
            body["prompt"] = body.get("prompt") or ""


def _agree(wanted: dict[str, Any] | None) -> None:
    """Let a response format have a schema if it is to follow one, and only then."""
    if wanted is None:
        return
    if wanted["type"] != "json_schema":
        wanted.pop("json_schema", None)
    elif wanted.get("json_schema") is None:
        wanted["type"] = "json_object"
