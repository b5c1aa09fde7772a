"""Ask a model that thinks through LiteLLM, streamed and not.

Usage: read_parts.py URL KEY. Prints JSON: thoughts, content and calls, and the same put together from a stream.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

url, key = sys.argv[1:]
RM = {"name": "rm", "parameters": {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]}}


def ask(text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    options |= {"api_base": f"{url}/v1", "api_key": key, "temperature": 0, "max_tokens": 40}
    return litellm.completion("hosted_vllm/scripted", messages, **options)


def parts(message: Any) -> list[Any]:
    calls = [[one.function.name, json.loads(one.function.arguments)] for one in message.tool_calls or ()]
    return [getattr(message, "reasoning_content", None), message.content, calls]


told = {}
for script, options in (("plain", {}), ("calls", {"tools": [{"type": "function", "function": RM}]})):
    told[script] = parts(ask(script, **options).choices[0].message)
    chunks = list(ask(script, stream=True, **options))
    told[f"{script} streamed"] = parts(litellm.stream_chunk_builder(chunks).choices[0].message)
print(json.dumps(told))
