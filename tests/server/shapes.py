"""Requests as real clients send them, and what they must get. `test_shapes` sends each, streamed and not.

The model answers by the last words of a conversation, whatever stands before them: see `SCRIPTS` and `SAID`. Held by a
grammar, it writes the first of the values that a function may get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGE, COUNT = "/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"
INPUT_TOKENS = "/v1/responses/input_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE, INFILL = "/api/chat", "/api/generate", "/infill"
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PATCH = '*** Begin Patch\n*** Add File: a "b".py\n+x = "\\n"\n*** End Patch'
SCRIPTS: Mapping[str, list[str]] = {
    "Greet.": ["Hel", "lo, ", "you."],
    "Think.": ["<think>I ", "see.\n", "</think>\n", "\nGood", " day."],
    "Json.": ['{"a', '": 7', "}"],
    "List.": ['<tool_call>\n{"name": "', 'shell", "argu', 'ments": {"command"', ': "ls"}', "}\n</tool", "_call>"],
    "Patch.": [
        '<tool_call>\n{"name": "apply_patch"',
        ', "arguments": {"input":',
        ' "*** Begin Patch\\',
        "n*** Add File: a \\",
        '"b\\".py\\n+x = \\"\\\\n\\',
        '"\\n*** End Patch',
        '"}}\n</tool_call>',
    ],
    "Fill.": [*MARKS, "fil", "led"],
}


@dataclass(frozen=True)
class Said:
    """What an answer says, whichever form it has."""

    text: str = ""
    thoughts: str = ""
    calls: tuple[tuple[str, Any], ...] = ()  # names, and what they are called with


SAID: Mapping[str, Said] = {
    "Greet.": Said("Hello, you."),
    "Think.": Said("Good day.", "I see."),
    "Json.": Said('{"a": 7}'),
    "List.": Said(calls=(("shell", {"command": "ls"}),)),
    "Patch.": Said(calls=(("apply_patch", PATCH),)),
    "Fill.": Said("filled"),
    "Seven.": Said("7"),
    "": Said(),
}


@dataclass(frozen=True)
class Shape:
    """One request of one client."""

    client: str
    door: str
    body: Mapping[str, Any] | None = None  # None: no body, so that the method is GET
    says: str = "Greet."  # key of `SAID`
    status: int = 200
    ignored: tuple[str, ...] = ()  # fields that the answer must name as left aside
    method: str = ""  # other than POST with a body and GET without one
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.client


def user(text: str = "Greet.") -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str = "You are a coding agent.") -> dict[str, Any]:
    return {"role": "system", "content": text}


def asked(text: str = "Greet.", **fields: Any) -> dict[str, Any]:
    """Return a body with a conversation of two messages."""
    return {"model": "gpt-5", "messages": [system(), user(text)], **fields}


def parts(*texts: str, kind: str = "text", **more: Any) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text, **more} for text in texts]


SCHEMA: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command", "enum": ["ls", "pwd"]}},
    "required": ["command"],
    "additionalProperties": False,
}
SHELL: dict[str, Any] = {"name": "shell", "description": "Runs a command.", "parameters": SCHEMA}
READ = {**SHELL, "name": "read", "description": "Reads a file."}
TOOLS = [{"type": "function", "function": one} for one in (SHELL, READ)]
STRICT = [{"type": "function", "function": {**SHELL, "strict": True}}]
FLAT = [{"type": "function", **one, "strict": False} for one in (SHELL, READ)]
OWN = [{"name": one["name"], "description": one["description"], "input_schema": SCHEMA} for one in (SHELL, READ)]
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": A, "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "shell", "arguments": '{"command":"ls"}'}}
CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** Begin Patch"'}},
    },
}
CUSTOM_CALL = {"type": "custom", "custom": {"name": "apply_patch", "input": PATCH}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "a.py\nGreet."}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
CACHED = {"cache_control": {"type": "ephemeral"}}

OF_CHAT = [
    Shape("OpenAI's client: a conversation", CHAT, asked()),
    Shape(
        "OpenAI's client: a form, and fields of its own servers",
        CHAT,
        asked(
            "Json.",
            response_format=FORM,
            store=False,
            metadata={"run": "1"},
            reasoning_effort="low",
            verbosity="low",
            service_tier="auto",
            safety_identifier="u",
            prompt_cache_key="k",
            prompt_cache_retention="24h",
        ),
        "Json.",
        ignored=("verbosity", "prompt_cache_retention"),
    ),
    Shape("OpenAI's client: JSON", CHAT, asked("Json.", response_format={"type": "json_object"}), "Json."),
    Shape(
        "OpenAI's client: a prediction",
        CHAT,
        asked(prediction={"type": "content", "content": parts("Hello, you.")}, modalities=["text"]),
    ),
    Shape(
        "OpenAI's client: a developer, parts and log-probabilities",
        CHAT,
        {
            "model": "gpt-5",
            "messages": [{"role": "developer", "content": parts("Be brief.")}, {**user(), "content": parts("Greet.")}],
            "max_completion_tokens": 64,
            "seed": 7,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 1,
            "logit_bias": {},
        },
    ),
    Shape(
        "OpenAI's client: a call and its result, with all fields of an answer",
        CHAT,
        asked(tools=TOOLS)
        | {
            "messages": [
                user("What is here?"),
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [CALL],
                },
                RESULT,
            ]
        },
    ),
    Shape(
        "opencode: its tools",
        CHAT,
        asked("List.", tools=TOOLS, tool_choice="auto", max_tokens=2000, stream_options={"include_usage": True}),
        "List.",
    ),
    Shape(
        "opencode: thoughts sent back",
        CHAT,
        asked(max_tokens=2000, tools=TOOLS)
        | {
            "messages": [
                system(),
                user("What is here?"),
                {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
                {**RESULT, "name": "shell"},
            ]
        },
    ),
    Shape("opencode: a title", CHAT, asked("Think.", temperature=0.5, max_tokens=400), "Think."),
    Shape(
        "aider: an edit, with marks of a cache",
        CHAT,
        {
            "model": "openai/card",
            "messages": [
                {"role": "system", "content": parts("Act as an expert.", **CACHED)},
                user("Change it."),
                {"role": "assistant", "content": "Ok."},
                user(),
            ],
            "temperature": 0,
            "stream_options": {"include_usage": True},
        },
    ),
    Shape(
        "Cline: text and environment as parts",
        CHAT,
        {
            "model": "card",
            "messages": [system(), {"role": "user", "content": parts("<task>x</task>", "Greet.")}],
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "reasoning_effort": "medium",
        },
    ),
    Shape(
        "Roo Code: native tools",
        CHAT,
        asked("List.", tools=STRICT, tool_choice="auto", parallel_tool_calls=False, max_completion_tokens=1000),
        "List.",
    ),
    Shape("Continue: no bound", CHAT, asked(max_tokens=-1)),
    Shape(
        "Continue: an agent",
        CHAT,
        asked("List.", max_tokens=1024, tools=TOOLS, parallel_tool_calls=False, stop=["<|im_end|>"]),
        "List.",
    ),
    Shape(
        "Zed: its agent",
        CHAT,
        asked(
            "List.",
            max_completion_tokens=1024,
            stop=[],
            temperature=1.0,
            tools=TOOLS,
            tool_choice="auto",
            parallel_tool_calls=False,
            prompt_cache_key="thread",
            reasoning_effort=None,
        ),
        "List.",
    ),
    Shape(
        "Open WebUI: a chat",
        CHAT,
        asked(
            "Think.",
            stream_options={"include_usage": True},
            temperature=0.8,
            top_p=0.9,
            frequency_penalty=0,
            stop=["<|x|>"],
        ),
        "Think.",
    ),
    Shape(
        "Open WebUI: a title",
        CHAT,
        {"model": "card", "messages": [user()], "max_completion_tokens": 1000, "stream": False},
    ),
    Shape(
        "LangChain: a conversation with names",
        CHAT,
        asked(n=1, temperature=0.7, stream_options={"include_usage": True})
        | {"messages": [system(), {**user(), "name": "Ada"}]},
    ),
    Shape(
        "LangChain: a function as the form of an answer",
        CHAT,
        asked(
            "List.",
            tools=STRICT,
            tool_choice={"type": "function", "function": {"name": "shell"}},
            parallel_tool_calls=False,
            ls_structured_output_format={"kwargs": {"method": "function_calling"}},
        ),
        "List.",
        ignored=("ls_structured_output_format",),
    ),
    Shape(
        "LiteLLM: blocks of thoughts sent back",
        CHAT,
        asked(tools=TOOLS, user="u", thinking={"type": "enabled", "budget_tokens": 1024})
        | {
            "messages": [
                user("What is here?"),
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "Hm.",
                    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
                    "provider_specific_fields": {"refusal": None},
                    "tool_calls": [{**CALL, "index": 0}],
                },
                RESULT,
            ]
        },
        ignored=("thinking_blocks", "thinking"),
    ),
    Shape(
        "llama.cpp: its page",
        CHAT,
        asked(
            "Think.",
            reasoning_format="auto",
            dynatemp_range=0,
            dynatemp_exponent=1,
            top_k=40,
            top_p=0.95,
            min_p=0.05,
            xtc_probability=0,
            xtc_threshold=0.1,
            typ_p=1,
            max_tokens=-1,
            samplers=["top_k", "typ_p", "top_p", "min_p", "temperature"],
            repeat_last_n=64,
            repeat_penalty=1,
            dry_multiplier=0,
            dry_base=1.75,
            dry_allowed_length=2,
            dry_penalty_last_n=-1,
            timings_per_token=True,
            return_progress=True,
        ),
        "Think.",
        ignored=(
            *("reasoning_format", "dynatemp_range", "dynatemp_exponent", "xtc_probability", "xtc_threshold", "typ_p"),
            *("samplers", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length"),
            *("dry_penalty_last_n", "timings_per_token"),
        ),
    ),
    Shape(
        "llama.cpp: a slot, a cache and a template without thoughts",
        CHAT,
        asked(cache_prompt=True, id_slot=0, n_keep=-1, chat_template_kwargs={"enable_thinking": False}),
        ignored=("cache_prompt", "id_slot", "n_keep"),
    ),
    Shape(
        "OpenAI's client: a custom tool with a grammar, its call and its result",
        CHAT,
        {
            "messages": [
                user("Edit it."),
                {"role": "assistant", "content": None, "tool_calls": [{"id": "c3", **CUSTOM_CALL}]},
                {"role": "tool", "tool_call_id": "c3", "content": "Greet."},
            ],
            "tools": [CUSTOM],
            "tool_choice": "auto",
        },
        ignored=("tools.format",),
    ),
    Shape("llama.cpp: a schema", CHAT, asked("Greet.", json_schema={"const": 7}), "Seven."),
    Shape("llama.cpp: a grammar", CHAT, asked("Greet.", grammar='root ::= "7"'), "Seven."),
    Shape(
        "vLLM: fields of sampling",
        CHAT,
        asked(
            top_k=20,
            min_p=0.0,
            repetition_penalty=1.0,
            stop_token_ids=[],
            min_tokens=0,
            ignore_eos=False,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            add_generation_prompt=True,
            continue_final_message=False,
            include_reasoning=True,
            priority=0,
            request_id="r",
            use_beam_search=False,
        ),
        ignored=(
            *("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt", "use_beam_search"),
            *("continue_final_message", "include_reasoning", "priority", "request_id"),
        ),
    ),
    Shape("vLLM: a choice", CHAT, asked("Json.", structured_outputs={"choice": ['{"a": 7}', "no"]}), "Json."),
    Shape("vLLM: an older form", CHAT, asked("Json.", guided_json=A), "Json."),
    Shape(
        "Copilot: a model of one's own",
        CHAT,
        asked(
            "List.",
            temperature=0,
            top_p=1,
            max_tokens=2048,
            n=1,
            tools=TOOLS,
            tool_choice="auto",
            stream_options={"include_usage": True},
            snippy={"enabled": False},
        ),
        "List.",
        ignored=("snippy",),
    ),
    Shape(
        "Vercel's AI SDK: an object",
        CHAT,
        asked(
            "Json.",
            response_format={"type": "json_schema", "json_schema": {"schema": A, "name": "response", "strict": True}},
        ),
        "Json.",
    ),
    Shape(
        "Pydantic AI: a call that must be",
        CHAT,
        asked("List.", tools=STRICT, tool_choice="required", parallel_tool_calls=True),
        "List.",
    ),
    Shape(
        "smolagents: stops beside tools",
        CHAT,
        asked("List.", tools=TOOLS, tool_choice="required", stop=["Observation:", "Calling tools:"])
        | {"messages": [{**user(), "content": parts("List.")}]},
        "List.",
    ),
    Shape(
        "Qwen Code: its session",
        CHAT,
        asked(metadata={"sessionId": "s", "promptId": "p"}, stream_options={"include_usage": True}, top_p=0.95)
        | {"messages": [{**system(), "content": parts("You are Qwen Code.", **CACHED)}, user()]},
    ),
    Shape("old functions", CHAT, asked(functions=[SHELL], function_call="auto"), status=400),
    Shape(
        "an image for a model of texts",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]},
        status=400,
    ),
]


def turn(text: str = "Greet.", role: str = "user") -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def codex(*items: dict[str, Any], tools: list[Any] | None = None) -> dict[str, Any]:
    """Return a turn of Codex."""
    return {
        "model": "card",
        "instructions": "You are Codex.",
        "input": [turn("<permissions>", "developer"), turn("<environment_context>"), *items],
        "tools": FLAT if tools is None else tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }


def of_codex(does: str, body: dict[str, Any], says: str = "Greet.", ignored: tuple[str, ...] = ()) -> Shape:
    return Shape(f"Codex: {does}", RESPONSE, body, says, ignored=("client_metadata", *ignored))


FREEFORM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. This is a FREEFORM tool.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'},
}
SHELL_CALL = {"type": "function_call", "name": "shell", "arguments": '{"command":"ls"}', "call_id": "c1"}
REASONED = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
OF_RESPONSES = [
    of_codex("its first turn", codex(turn("List.")), "List."),
    of_codex(
        "a call and its result",
        codex(
            turn("What is here?"),
            REASONED,
            SHELL_CALL,
            {"type": "function_call_output", "call_id": "c1", "output": parts("a.py", "Greet.", kind="input_text")},
        ),
    ),
    of_codex("a patch", codex(turn("Patch."), tools=[*FLAT, FREEFORM]), "Patch.", ("tools.format",)),
    of_codex(
        "a patch and its result",
        codex(
            turn("Edit it."),
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": PATCH, "status": "completed"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done!\nGreet."},
            tools=[*FLAT, FREEFORM],
        ),
        ignored=("tools.format",),
    ),
    of_codex(
        "calls of the shell of its maker's models",
        codex(
            turn("What is here?"),
            {
                "type": "local_shell_call",
                "id": "l1",
                "call_id": "c3",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "timeout_ms": 1000, "working_directory": "/"},
            },
            {"type": "function_call_output", "call_id": "c3", "output": "a.py\nGreet."},
        ),
    ),
    of_codex(
        "tools of its maker's servers, and what they did",
        codex(
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
            turn(),
            tools=[{"type": "web_search"}, {"type": "local_shell"}, {"type": "namespace", "name": "mcp"}, *FLAT],
        ),
        ignored=("tools.web_search", "tools.local_shell", "tools.namespace", "input.web_search_call"),
    ),
    Shape("OpenAI's client: a text", RESPONSE, {"model": "gpt-5", "input": "Greet."}),
    Shape(
        "OpenAI's client: a form",
        RESPONSE,
        {
            "model": "gpt-5",
            "input": [user("Json.")],
            "text": {"format": {"type": "json_schema", "name": "A", "schema": A, "strict": True}},
            "max_output_tokens": 100,
        },
        "Json.",
    ),
    Shape(
        "OpenAI's client: its last answer sent back",
        RESPONSE,
        {
            "model": "gpt-5",
            "input": [
                user("Hi"),
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "phase": "final_answer",
                    "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
                },
                user("Think."),
            ],
            "temperature": 0.2,
            "top_p": 1.0,
            "truncation": "disabled",
            "background": False,
            "metadata": {},
        },
        "Think.",
    ),
    Shape(
        "OpenAI's agents: a call that must be",
        RESPONSE,
        {
            "model": "gpt-5",
            "input": [user("List.")],
            "tools": [{"type": "function", **SHELL, "strict": True}],
            "tool_choice": "required",
            "include": [],
            "prompt": None,
            "conversation": None,
            "previous_response_id": None,
            "max_tool_calls": 4,
        },
        "List.",
        ignored=("max_tool_calls",),
    ),
    Shape(
        "Vercel's AI SDK: its conversation",
        RESPONSE,
        {
            "model": "gpt-5",
            "input": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": parts("Hi", kind="input_text")},
                {"role": "assistant", "content": parts("Hello.", kind="output_text"), "id": "msg_1"},
                SHELL_CALL,
                {"type": "function_call_output", "call_id": "c1", "output": "Greet."},
            ],
            "store": False,
            "tools": FLAT,
            "tool_choice": "auto",
        },
    ),
    Shape(
        "Cline: a function that must be called",
        RESPONSE,
        {"input": [user("List.")], "tools": FLAT, "tool_choice": {"type": "function", "name": "shell"}},
        "List.",
    ),
    Shape("an answer that is kept", RESPONSE, {"input": "Greet.", "previous_response_id": "resp_1"}, status=400),
]

BILLING = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=a1b2c;"
CLAUDE = {
    "model": "claude-opus-4-8",
    "system": [*parts(BILLING), *parts("You are Claude Code.", "# Tools", **CACHED)],
    "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
    "max_tokens": 32000,
}
OF_CLAUDE = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}


def claude(*messages: dict[str, Any], client: str, says: str = "Greet.", **fields: Any) -> Shape:
    """Return a request of Claude Code."""
    body = {**CLAUDE, "messages": list(messages), **fields}
    ignored = tuple({"context_management"} & fields.keys())
    return Shape(f"Claude Code: {client}", MESSAGE, body, says, ignored=ignored, headers=OF_CLAUDE)


def sdk(text: str = "Greet.", **fields: Any) -> dict[str, Any]:
    return {"model": "claude-opus-4-8", "max_tokens": 1024, "messages": [user(text)], **fields}


OF_ANTHROPIC = [
    claude(
        {"role": "user", "content": parts("<system-reminder>x</system-reminder>", "List.", **CACHED)},
        client="a turn",
        says="List.",
        tools=[*OWN[:1], {**OWN[1], **CACHED}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
    ),
    claude(
        user("What is here?"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "shell", "input": {"command": "ls"}, "caller": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a.py", "is_error": False, **CACHED},
                {"type": "text", "text": "Greet."},
            ],
        },
        client="a call and its result",
        tools=OWN,
    ),
    claude(
        user("Json."),
        client="a title",
        says="Json.",
        tools=[],
        temperature=1,
        output_config={"format": {"type": "json_schema", "schema": A}},
    ),
    claude(
        user("Think."),
        client="a budget of thoughts",
        says="Think.",
        thinking={"type": "enabled", "budget_tokens": 31999},
    ),
    claude({**user("quota"), "content": "Greet."}, client="a question for its quota", max_tokens=64, tools=None),
    Shape("OpenAI's client: tokens counted", INPUT_TOKENS, {"model": "x", "input": "foo", "tools": FLAT}),
    Shape("Claude Code: tokens counted", COUNT, {"model": "x", "messages": [user("foo")], "tools": OWN}),
    Shape("Anthropic's client: a text", MESSAGE, sdk("Think.", thinking={"type": "disabled"}), "Think."),
    Shape(
        "Anthropic's client: a tool that must be used",
        MESSAGE,
        sdk("List.", tools=OWN, tool_choice={"type": "tool", "name": "shell", "disable_parallel_tool_use": True}),
        "List.",
    ),
    Shape("Anthropic's client: any tool", MESSAGE, sdk("List.", tools=OWN, tool_choice={"type": "any"}), "List."),
    Shape(
        "Anthropic's client: sampling and stops",
        MESSAGE,
        sdk(
            system="Be brief.",
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            stop_sequences=["\n\nHuman:"],
            service_tier="auto",
            container=None,
            mcp_servers=[],
        ),
        ignored=("mcp_servers",),
    ),
    Shape(
        "Anthropic's client: tools of its maker's servers",
        MESSAGE,
        sdk(tools=[*OWN, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]),
        ignored=("tools.web_search_20250305",),
    ),
    Shape(
        "Anthropic's client: a document and a failed call",
        MESSAGE,
        sdk(tools=OWN)
        | {
            "messages": [
                user("What is here?"),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "shell", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": parts("no"), "is_error": True},
                        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
                        {"type": "text", "text": "Greet."},
                    ],
                },
            ]
        },
    ),
    Shape(
        "an answer of Claude's begun by the client",
        MESSAGE,
        sdk() | {"messages": [user(), {"role": "assistant", "content": "{"}]},
        status=400,
    ),
]

OF_OLLAMA = [
    Shape("Ollama's client: a conversation", OLLAMA_CHAT, {"model": "card", "messages": [user("Think.")]}, "Think."),
    Shape(
        "Ollama's client: tools and all of its fields",
        OLLAMA_CHAT,
        {
            "model": "card",
            "messages": [{**user("List."), "images": None, "tool_calls": None}],
            "tools": TOOLS,
            "format": None,
            "options": None,
            "keep_alive": None,
            "think": None,
            "logprobs": None,
        },
        "List.",
    ),
    Shape(
        "Ollama's client: a call and its result",
        OLLAMA_CHAT,
        {
            "model": "card",
            "messages": [
                user("What is here?"),
                {
                    "role": "assistant",
                    "thinking": "Hm.",
                    "tool_calls": [{"function": {"name": "shell", "arguments": {"command": "ls"}}}],
                },
                {"role": "tool", "tool_name": "shell", "content": "Greet."},
            ],
            "tools": TOOLS,
            "think": True,
        },
    ),
    Shape("Ollama's client: a schema", OLLAMA_CHAT, {"messages": [user("Json.")], "format": A}, "Json."),
    Shape(
        "Ollama's client: a prompt",
        OLLAMA_GENERATE,
        {"model": "card", "prompt": "Greet.", "system": "Be brief.", "template": "", "context": [], "raw": False},
        ignored=("template", "context"),
    ),
    Shape(
        "Ollama's client: a gap",
        OLLAMA_GENERATE,
        {"model": "card", "prompt": "def f(", "suffix": "):", "options": {"num_predict": 64, "temperature": 0}},
        "Fill.",
    ),
    Shape(
        "Open WebUI: Ollama",
        OLLAMA_CHAT,
        {
            "model": "card:latest",
            "messages": [system(), user()],
            "options": {"temperature": 0.8, "num_ctx": 8192, "repeat_last_n": 64},
            "format": "json",
            "keep_alive": "5m",
        }
        | {"format": ""},
        ignored=("num_ctx", "repeat_last_n"),
    ),
    Shape(
        "Continue: a gap from Ollama",
        OLLAMA_GENERATE,
        {
            "model": "card",
            "prompt": "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>",
            "raw": True,
            "keep_alive": 1800,
            "options": {"num_predict": 256, "num_ctx": 4096, "temperature": 0.01, "stop": ["<|endoftext|>", "\n\n"]},
        },
        "Fill.",
        ignored=("num_ctx",),
    ),
    Shape(
        "LangChain: Ollama",
        OLLAMA_CHAT,
        {
            "model": "card",
            "messages": [{**user("List."), "images": []}],
            "tools": TOOLS,
            "options": {"mirostat": None, "num_ctx": None, "temperature": 0.8, "stop": None, "tfs_z": None},
            "format": "",
            "keep_alive": None,
        },
        "List.",
    ),
    Shape(
        "Zed: Ollama",
        OLLAMA_CHAT,
        {
            "model": "card",
            "messages": [system(), {**user("List."), "images": None}],
            "keep_alive": -1,
            "options": {"num_ctx": 8192, "stop": [], "temperature": 1.0},
            "tools": TOOLS,
            "think": False,
        },
        "List.",
        ignored=("num_ctx",),
    ),
    Shape("Ollama's program: is the model there", OLLAMA_CHAT, {"model": "card"}, ""),
    Shape("Copilot: figures of a model", "/api/show", {"model": "card"}),
    Shape("Copilot: models", "/api/tags"),
    Shape("a model to be fetched", "/api/pull", {"model": "llama3.2"}, status=501),
]

VIM = {
    "id_slot": 0,
    "input_prefix": "def f(\n",
    "input_suffix": "):\n",
    "input_extra": [{"filename": "a.py", "text": "import os\n", "time": 1}],
    "prompt": "    x",
    "n_predict": 128,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
}
OF_VIM = ("id_slot", "n_indent", "samplers", "cache_prompt", "t_max_prompt_ms", "t_max_predict_ms", "time")
OF_COMPLETIONS = [
    Shape(
        "OpenAI's client: a prompt, with neutral values",
        COMPLETION,
        {"model": "x", "prompt": "Greet.", "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "n": 1},
    ),
    Shape(
        "lm-eval: scores",
        COMPLETION,
        {"model": "x", "prompt": ["Greet."], "max_tokens": 16, "logprobs": 1, "seed": 1234, "temperature": 0},
    ),
    Shape(
        "Continue: a gap",
        COMPLETION,
        {"model": "x", "prompt": "def f(", "suffix": "):", "max_tokens": 64, "stop": ["\n\n", "\r\n\r\n"]},
        "Fill.",
    ),
    Shape(
        "Twinny: a gap with the marks of its own",
        COMPLETION,
        {"model": "x", "prompt": "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>", "max_tokens": 64},
        "Fill.",
    ),
    Shape("llama.vim: a gap", INFILL, VIM, "Fill.", ignored=OF_VIM),
    Shape("llama.vim: a prompt read ahead", INFILL, VIM | {"n_predict": 0}, "", ignored=OF_VIM),
    Shape("llama.cpp: a schema of a completion", COMPLETION, {"prompt": "Json.", "json_schema": A}, "Json."),
    Shape("vLLM: an expression", COMPLETION, {"prompt": "Json.", "guided_regex": '\\{"a": [0-9]\\}'}, "Json."),
    Shape("llama.cpp: its own path of completions", "/completion", {"prompt": "Greet.", "n_predict": 8}, status=404),
    Shape("embeddings", "/v1/embeddings", {"model": "x", "input": "Greet."}, status=501),
]
OF_LISTS = [
    Shape("OpenAI's client: models", "/v1/models"),
    Shape("OpenAI's client: one model", "/v1/models/card"),
    Shape("llama.cpp: health", "/health"),
    Shape("Claude Code: is there a server", "/", method="HEAD"),
    Shape("vLLM: tokens of a conversation", "/tokenize", {"model": "x", "messages": [user()]}),
    Shape("Ollama's client: version", "/api/version"),
]

SHAPES: tuple[Shape, ...] = (*OF_CHAT, *OF_RESPONSES, *OF_ANTHROPIC, *OF_OLLAMA, *OF_COMPLETIONS, *OF_LISTS)
