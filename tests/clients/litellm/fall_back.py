"""Ask through LiteLLM's router, whose first model has too small a context for the long question.

Usage: fall_back.py PREFIX SMALL_URL LARGE_URL KEY. Prints JSON: who answered each question, and what one alone says.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

prefix, small_url, large_url, key = sys.argv[1:]
LONG, SHORT = "A farmer has 12 cows. " * 60, "A farmer has 12 cows."


def deployment(name: str, url: str) -> dict[str, Any]:
    served = f"{name}-model"
    return {
        "model_name": name,
        "litellm_params": {"model": f"{prefix}/{served}", "api_base": f"{url}/v1", "api_key": key},
    }


router = litellm.Router(
    [deployment("small", small_url), deployment("large", large_url)],
    context_window_fallbacks=[{"small": ["large"]}],
    num_retries=0,
)


def asked(text: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return router.completion("small", messages, temperature=0, max_tokens=4, **options)


told: dict[str, Any] = {}
for name, text in (("short", SHORT), ("long", LONG)):
    told[name] = asked(text).model
    told[f"{name} streamed"] = next(iter(asked(text, stream=True))).model
answer = asked(SHORT).choices[0].message
history = [{"role": "user", "content": SHORT}, answer.model_dump(), {"role": "user", "content": "And?"}]
told["history"] = router.completion("small", history, temperature=0, max_tokens=4).model
try:
    only = deployment("small", small_url)["litellm_params"]
    litellm.completion(messages=[{"role": "user", "content": LONG}], max_tokens=4, num_retries=0, **only)
except litellm.ContextWindowExceededError:
    told["alone"] = "ContextWindowExceededError"
print("\n" + json.dumps(told))
