"""Tools of a model and of a chat request: the prompt, the grammar, and how the answer is read."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from card.config import Grammar
from card.server.errors import bad_request
from card.server.schemas import THINKING_SWITCHES, ChatRequest, Message
from card.server.tool_schemas import FunctionDefinition, NamedCustom, NamedTool
from card.server.tools.grammar import Guide
from card.text.parts.answer_format import AnswerFormat
from card.text.parts.calls import JsonCalls
from card.text.parts.formats import FORMATS
from card.text.parts.leads import Lead
from card.text.parts.view import AnswerView, ModelAnswers
from card.text.prompts import Conversation

_INTRODUCTION = (
    "You can call functions. Each line between <tools> and </tools> describes one in JSON:\n<tools>\n{tools}\n"
    "</tools>\n"
    "To call functions, write the following and nothing behind it, with the function's name and a JSON object of its "
    "arguments:\n{example}\nThe results come back between <tool_response> and </tool_response>."
)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template with tools: arguments of earlier calls as objects."""
    rendered = []
    for message in messages:
        one = {**message.model_dump(include={"role", "content", "name", "tool_call_id"}), **_reasoning(message)}
        if message.tool_calls:
            one["tool_calls"] = [call.as_template_has_it() for call in message.tool_calls]
        rendered.append({name: value for name, value in one.items() if value is not None})
    return rendered


def _reasoning(message: Message) -> dict[str, str]:
    reasoning = message.reasoning_content or message.reasoning
    return {"reasoning_content": reasoning} if reasoning else {}


def plain_messages(
    messages: Sequence[Message], functions: Sequence[FunctionDefinition], form: JsonCalls
) -> list[dict[str, Any]]:
    """Return messages for a chat template without tools.

    The system message describes the functions; calls are text of the assistant, results are text of the user.
    """
    told: list[dict[str, Any]] = []
    last_role = ""
    for message in messages:
        role, content = message.role, message.content
        if message.tool_calls:
            calls = [(call.function.name, call.function.arguments.strip() or "{}") for call in message.tool_calls]
            content = "\n".join(filter(None, (str(content), form.write(calls))))
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if last_role == "tool":  # several results are one turn of the user
                told[-1]["content"] += "\n" + content
                continue
        last_role = role
        one = {"role": "user" if role == "tool" else role, "content": content, **_reasoning(message)}
        told.append(one if message.name is None or role == "tool" else {**one, "name": message.name})
    if not functions:
        return told
    tools = "\n".join(json.dumps(one.as_template_has_it(), ensure_ascii=False) for one in functions)
    introduction = _INTRODUCTION.format(tools=tools, example=form.write([("NAME", "ARGUMENTS")]))
    if told[0]["role"] in ("system", "developer"):
        first = {**told[0], "content": "\n\n".join(filter(None, (told[0]["content"], introduction)))}
        return [first, *told[1:]]
    return [{"role": "system", "content": introduction}, *told]


# ---- plans -----------------------------------------------------------------------------------------------------------


_ROLES = {"developer": "system"}
_MISTRAL_ID_LENGTH = 9  # Mistral's templates refuse other ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """Everything that a chat request needs from the model, with tools or without."""

    answers: ModelAnswers
    conversation: Conversation
    guide: Guide
    grammar_param: str  # the field of the request that the grammar came from
    tools: Mapping[str, Mapping[str, Any]]  # schemas of the functions that may be called, by name
    most_calls: int | None = None
    is_forced: bool = False  # the answer has only calls

    def view(self, prompt_ids: Sequence[int]) -> AnswerView | None:
        """Return how an answer behind a prompt is read; None if all of it is content."""
        if not self.answers.has_parts(self.tools):
            return None
        return self.answers.view(
            prompt_ids,
            self.tools,
            takes_bare=not self.guide.holds_calls,
            has_content=not self.is_forced,
            most_calls=self.most_calls,
        )

    def grammar(self, prompt_ids: Sequence[int]) -> Grammar | None:
        """Return the grammar of an answer behind a prompt."""
        return self.guide.grammar(self.answers.part_begun(prompt_ids))

    def new_call_id(self) -> str:
        """Return an id for a call."""
        if self.answers.form.name.startswith("mistral"):
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID_LENGTH))
        return f"call_{secrets.token_hex(12)}"


class ToolSupport:
    """The formats in which one model reads the list of tools and writes calls."""

    def __init__(self, answers: ModelAnswers) -> None:
        self._answers = answers
        self._knows_developers = "developer" in answers.template

    @property
    def form(self) -> AnswerFormat:
        """The model's format."""
        return self._answers.form

    @property
    def limits_thoughts(self) -> bool:
        """True if thoughts can have a budget, or there are none."""
        lead = Lead(self.form, self._answers.mark_ids, None)
        return lead.is_empty or lead.can_be_limited

    def plan(self, fields: ChatRequest) -> ToolPlan:
        """Return the plan of a request.

        Raises: ApiError 400 if the model's format of calls is unknown, or the fields contradict each other.
        """
        try:
            return self._plan(fields)
        except RecursionError:
            raise bad_request("a schema is nested too deeply; make it flatter", "tools") from None

    def _plan(self, fields: ChatRequest) -> ToolPlan:
        choice, answers = fields.tool_choice, self._answers
        named = choice.function.name if isinstance(choice, NamedTool | NamedCustom) else None
        functions = [tool.function for tool in fields.tools] if choice != "none" else []
        if functions and not answers.writes_calls:
            raise bad_request(
                "this model writes tool calls in a format that the server does not read; leave tools out, or serve the "
                f"model with --answer-format {'|'.join(name for name, one in FORMATS.items() if one.writes_calls)}",
                "tools",
            )
        conversation = self.conversation(fields.messages, functions, template_variables(fields, answers.form))
        if named is not None:
            functions = [function for function in functions if function.name == named]
        is_forced = bool(functions) and choice != "auto"
        several = fields.parallel_tool_calls
        if several is None:  # made to call, a small model would call again and again
            several = choice != "required"
        allows_several = several and named is None
        content = fields.grammar()
        if functions and not is_forced and content is not None and content.kind not in ("json_object", "json_schema"):
            raise bad_request(f'{fields.guide} does not go with tool_choice "auto"; leave one out', fields.guide)
        guide = Guide(
            form=answers.form,
            mark_ids=answers.mark_ids,
            functions=tuple(functions),
            content=content,
            is_forced=is_forced,
            allows_several=allows_several,
            thinking_budget=fields.thinking_budget,
        )
        return ToolPlan(
            answers=answers,
            conversation=conversation,
            guide=guide,
            grammar_param="tools" if functions else fields.guide if content is not None else "thinking_budget",
            tools={function.name: function.parameters or {} for function in functions},
            most_calls=None if allows_several else 1,
            is_forced=is_forced,
        )

    def conversation(
        self,
        messages: Sequence[Message],
        functions: Sequence[FunctionDefinition] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Conversation:
        """Return messages as the chat template takes them."""
        if not self._knows_developers:  # the newer name of the system role, which templates silently ignore
            messages = [one.model_copy(update={"role": _ROLES.get(one.role, one.role)}) for one in messages]
        calls = self.form.calls
        if self._answers.knows_tools or not isinstance(calls, JsonCalls):
            tools = [function.as_template_has_it() for function in functions]
            return Conversation(template_messages(messages), tools, kwargs)
        return Conversation(plain_messages(messages, functions, calls), (), kwargs)


def template_variables(fields: ChatRequest, form: AnswerFormat) -> dict[str, Any]:
    """Return what a request gives to the chat template: its own variables first, then how much to think."""
    variables = dict(fields.chat_template_kwargs)
    effort = fields.reasoning_effort
    if effort is not None:
        variables.setdefault("reasoning_effort", form.no_effort if effort == "none" else effort)
        for name in THINKING_SWITCHES:
            variables.setdefault(name, effort != "none")
    if fields.thinking_budget is not None:
        variables.setdefault("thinking_budget", fields.thinking_budget)
    return variables
