"""A model that works as coding agents ask it to: it lists a file, edits it and runs a test, by each agent's own tool,
and thinks before each step.

Real weights whose last token decides. The chat template finds out which agent asks, by the tools that it offers, and
how far its work is, by what its commands have written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.server.scripted import Scripted, scripted_bytes

TASK = "begin-work"  # what the user asks for
THOUGHTS = "What comes next?"  # before each step
DONE = ("All is", " well.")
MOST_TOKENS = 131_072
EDIT = f"""calc.py
{"`" * 3}python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE"""  # as aider has its edits
# Agents by the tool that runs a command, and the arguments of a call beside the command.
AGENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Bash": ("command", {"description": "Works"}),  # Claude Code
        "exec_command": ("cmd", {}),  # Codex
        "bash": ("command", {"description": "Works"}),  # opencode
    }
)
COMMANDS: Mapping[str, str] = MappingProxyType(  # by what has been written before
    {
        TASK: "ls && echo listed-it",
        "listed-it": "sed -i s/-/+/ calc.py && echo edited-it",
        "edited-it": "python3 test_calc.py && echo tested-it",
        "tested-it": "",
    }
)
_TEMPLATE = """{#- <think> </think> <tool_call> </tool_call> -#}
{%- set found = namespace(tool='', step='') -%}
{%- for tool in tools or [] if tool.function.name in TOOLS -%}{%- set found.tool = tool.function.name -%}{%- endfor -%}
{%- for step in STEPS -%}
{%- for message in messages if message.role != 'assistant' and step in (message.content | string) -%}
{%- set found.step = step -%}
{%- endfor -%}
{%- endfor -%}
{%- if found.tool -%}{{- found.tool + ' ' + found.step -}}
{%- elif 'SEARCH/REPLACE' in (messages[0].content | string) -%}by blocks
{%- else -%}no tools
{%- endif -%}"""


def working_model() -> Scripted:
    """Return the model."""
    scripts = {"no tools": ["A ", "title"], "by blocks": [EDIT, f"\n{'`' * 3}\n"]}
    num_calls = 0
    for tool, (name, others) in AGENTS.items():
        for step, command in COMMANDS.items():
            call = json.dumps({"name": tool, "arguments": {name: command, **others}})
            end = "\n" * (num_calls + 1) + "</tool_call>"  # another token in each script
            thoughts = f"<think>{THOUGHTS}{' ' * num_calls}</think>\n"
            spoken = (
                [thoughts, f"<tool_call>\n{call}", end]
                if command
                else [thoughts, f"{DONE[0]}{' ' * num_calls}", DONE[1] + "\n" * num_calls]
            )
            scripts[f"{tool} {step}"] = spoken
            num_calls += 1
    template = _TEMPLATE.replace("TOOLS", json.dumps(list(AGENTS))).replace("STEPS", json.dumps(list(COMMANDS)))
    return scripted_bytes(scripts, template, max_model_len=MOST_TOKENS)
