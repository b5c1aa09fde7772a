"""Anthropic's client works until the model calls nothing more; run in the environment of the agents."""

from __future__ import annotations

import json
import subprocess
import sys

import anthropic

MOST_TURNS, COMMAND_S = 8, 60
url, task = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, auth_token="none", max_retries=0, timeout=1800)
schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tool = {"name": "Bash", "description": "Runs a command of the shell.", "input_schema": schema}
turns = [{"role": "user", "content": task}]
commands, thoughts = [], []
for _ in range(MOST_TURNS):
    counted = client.messages.count_tokens(model="card", messages=turns, tools=[tool])
    with client.messages.stream(model="card", max_tokens=300, messages=turns, tools=[tool]) as stream:
        pieces = list(stream.text_stream)
        answer = stream.get_final_message()
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    thoughts += [block.thinking.strip() for block in answer.content if block.type == "thinking"]
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    assert answer.stop_reason in ("tool_use", "max_tokens")
    results = []
    for call in calls:
        commands.append(call.input.get("command", ""))
        done = subprocess.run(
            ["timeout", str(COMMAND_S), "bash", "-c", commands[-1]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": done.stdout})
    turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
print(json.dumps({"commands": commands, "thoughts": thoughts, "text": "".join(pieces), "reason": answer.stop_reason}))
