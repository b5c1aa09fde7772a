"""Anthropic's client works until the model calls nothing more; run in the environment of the agents."""

from __future__ import annotations

import json
import subprocess
import sys

import anthropic

url, task = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, auth_token="none", max_retries=0)
tool = {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object"}}
turns = [{"role": "user", "content": task}]
commands = []
while True:
    counted = client.messages.count_tokens(model="scripted", messages=turns, tools=[tool])
    with client.messages.stream(model="scripted", max_tokens=100, messages=turns, tools=[tool]) as stream:
        pieces = list(stream.text_stream)
        answer = stream.get_final_message()
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    assert answer.stop_reason == "tool_use"
    commands += [call.input["command"] for call in calls]
    results = []
    for call in calls:
        done = subprocess.run(["bash", "-c", call.input["command"]], stdout=subprocess.PIPE, text=True, check=True)
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": done.stdout})
    turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
print(json.dumps({"commands": commands, "text": "".join(pieces), "reason": answer.stop_reason}))
