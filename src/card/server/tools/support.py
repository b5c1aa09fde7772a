"""Tools of a model and of a chat request: the prompt, the grammar, and the parsing of the answer."""

from __future__ import annotations

import contextlib
import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from card.config import Grammar
from card.server.errors import bad_request
from card.server.schemas import ChatRequest, Message
from card.server.tool_schemas import FunctionDefinition, NamedTool
from card.server.tools.formats import FORMATS, MISTRAL, ToolFormat, ToolParserName, find_format, has_tools
from card.server.tools.grammar import ToolGrammar
from card.server.tools.parser import ToolParser
from card.text.prompts import Conversation
from card.text.tokenizer import Tokenizer

_INTRODUCTION = (
    "You can call functions. Each line between <tools> and </tools> describes one in JSON:\n<tools>\n{tools}\n"
    "</tools>\n"
    "To call functions, write the following and nothing behind it, with the function's name and a JSON object of its "
    "arguments:\n{example}\nThe results come back between <tool_response> and </tool_response>."
)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template with tools: arguments of earlier calls as objects."""
    told = []
    for message in messages:
        one = {**message.model_dump(include={"role", "content", "name", "tool_call_id"}), **_reasoning(message)}
        if message.tool_calls:
            one["tool_calls"] = [call.as_template_has_it() for call in message.tool_calls]
        told.append({name: value for name, value in one.items() if value is not None})
    return told


def _reasoning(message: Message) -> dict[str, str]:
    reasoning = message.reasoning_content or message.reasoning
    return {"reasoning_content": reasoning} if reasoning else {}


def plain_messages(
    messages: Sequence[Message], functions: Sequence[FunctionDefinition], form: ToolFormat
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
    """Everything that a chat request with tools needs from the model."""

    conversation: Conversation
    grammar: Grammar | None
    grammar_param: str  # the field of the request that the grammar came from
    form: ToolFormat | None  # of calls in the answer; None: the answer has no calls
    shown_ids: tuple[int, ...] = ()  # special tokens that mark calls
    names: frozenset[str] = frozenset()
    most_calls: int | None = None
    is_forced: bool = False  # the answer has only calls

    def parser(self) -> ToolParser | None:
        """Return a parser for one answer; None if all of it is content."""
        if self.form is None:
            return None
        return ToolParser(
            self.form,
            self.names,
            is_held_to_grammar=self.grammar is not None,
            has_content=not self.is_forced,
            most_calls=self.most_calls,
        )

    def new_call_id(self) -> str:
        """Return an id for a call."""
        if self.form is MISTRAL:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID_LENGTH))
        return f"call_{secrets.token_hex(12)}"


class ToolSupport:
    """The formats in which one model reads the list of tools and writes calls."""

    def __init__(self, tokenizer: Tokenizer, parser: ToolParserName = "auto") -> None:
        """Detect the format from chat template and vocabulary, unless ``parser`` names one."""
        template = ""
        with contextlib.suppress(ValueError):  # there is none
            # A model may have a separate template for tools; any list makes the tokenizer choose it.
            template = tokenizer.get_chat_template(tools=[{}])
        vocabulary = tokenizer.get_vocab()
        self._knows_tools = has_tools(template)
        self._knows_developers = "developer" in template
        self.form = FORMATS[parser] if parser != "auto" else find_format(template, vocabulary)
        self._mark_ids: dict[str, int] = {}
        if self.form is not None:
            added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
            marks = (self.form.marker, self.form.closing.strip())
            self._mark_ids = {mark: added[mark] for mark in marks if mark in added}

    def plan(self, fields: ChatRequest) -> ToolPlan:
        """Return the plan of a request.

        Raises: ApiError 400 if the model's format of calls is unknown, or the fields contradict each other.
        """
        try:
            return self._plan(fields)
        except RecursionError:
            raise bad_request("a schema is nested too deeply; make it flatter", "tools") from None

    def _plan(self, fields: ChatRequest) -> ToolPlan:
        choice = fields.tool_choice
        functions = [tool.function for tool in fields.tools] if choice != "none" else []
        form = self.form
        if functions and form is None:
            raise bad_request(
                "this model writes tool calls in a format that the server does not read; leave tools out, or serve the "
                f"model with --tool-parser {'|'.join(FORMATS)}",
                "tools",
            )
        kwargs = dict(fields.chat_template_kwargs)
        if fields.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", fields.reasoning_effort)
        conversation = self.conversation(fields.messages, functions, kwargs)
        guide = fields.grammar()
        if not functions or form is None:
            return ToolPlan(conversation=conversation, grammar=guide, grammar_param=fields.guide, form=None)
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
        is_forced = choice != "auto"
        allows_several = fields.parallel_tool_calls and not isinstance(choice, NamedTool)
        grammars = ToolGrammar(form, functions, self._mark_ids, allows_several=allows_several)
        grammar: Grammar | None = None
        if is_forced:
            grammar = grammars.forced()
        elif guide is not None:
            if guide.kind not in ("json_object", "json_schema"):
                raise bad_request(f'{fields.guide} does not go with tool_choice "auto"; leave one out', fields.guide)
            grammar = grammars.or_json(guide.source or '{"type": "object"}')
        elif any(function.strict for function in functions):
            grammar = grammars.free()
        return ToolPlan(
            conversation=conversation,
            grammar=grammar,
            grammar_param="tools",
            form=form,
            shown_ids=tuple(sorted(self._mark_ids.values())),
            names=frozenset(function.name for function in functions),
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
        if self._knows_tools or self.form is None:
            told = [function.as_template_has_it() for function in functions]
            return Conversation(template_messages(messages), told, kwargs)
        return Conversation(plain_messages(messages, functions, self.form), (), kwargs)
