"""Bodies of Anthropic's API, and their conversion to chat completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from card.server.anthropic.blocks import Cached, TextBlock, Turn, as_blocks, or_text, remind, texts_of
from card.server.bodies import fitted
from card.server.sampling_fields import same_at, with_fields
from card.server.schemas import MAX_MESSAGES, THINKING_SWITCHES, ChatRequest, StopStrings, TemplateKwargs
from card.server.strict import Ignored, Strict
from card.server.tool_schemas import MAX_TOOLS, NAME_PATTERN

# A line that Claude Code writes first into the system prompt. It differs in each request, so that no later word of the
# prompt would be read again from the cache.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
_EFFORTS = {"max": "xhigh"}  # efforts that OpenAI's API names otherwise


class OfferedTool(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=NAME_PATTERN)
    type: Literal["custom"] = "custom"
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None
    input_examples: list[Any] = Field(default_factory=list, description="ignored, like the fields below")
    allowed_callers: list[Any] = Field(default_factory=list)
    defer_loading: bool = False
    eager_input_streaming: bool = False
    cache_control: Cached

    def as_chat(self) -> dict[str, Any]:
        """Return the tool as chat completions have it."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class ToolUse(Strict):
    """The choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> ToolUse:
        if (self.type == "tool") != bool(self.name):
            raise ValueError("name belongs to the type tool, and that type needs it")
        return self

    def as_chat(self) -> str | dict[str, Any]:
        """Return the choice as chat completions have it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Strict):
    """Thoughts before an answer, and their budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted", "full"] = Field("full", description="ignored")


class OutputFormat(Strict):
    """Form that the text of an answer must have."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The effort of thinking, and the form of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class User(Strict):
    """The user of a client."""

    user_id: str = Field("", description="ignored")


if TYPE_CHECKING:
    _Sampled = Strict
else:
    _Sampled = with_fields(Strict, "anthropic")


class CountRequest(Strict):
    """Body of `POST /v1/messages/count_tokens`."""

    spelling: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        **dict.fromkeys(("grammar", "response_format"), "output_config.format"),
        "reasoning_effort": "output_config.effort",
        "thinking_budget": "thinking.budget_tokens",
    }

    model: str = ""
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: list[TextBlock] = Field(default_factory=list, fail_fast=True, json_schema_extra=or_text)
    tools: list[OfferedTool] = Field(default_factory=list, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolUse = Field(default_factory=lambda: ToolUse(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    _take_text = field_validator("system", mode="before")(as_blocks)

    @field_validator("tools", mode="before")
    @classmethod
    def _own_tools_alone(cls, value: object, info: ValidationInfo) -> object:
        """Leave out tools that run on their maker's server, or whose form only the maker's models know."""
        if not (isinstance(value, list) and isinstance(info.context, Ignored)):
            return value
        others = [one for one in value if isinstance(one, dict) and "input_schema" not in one and "type" in one]
        for one in others:
            info.context.note(f"tools.{one['type']}")
        return [one for one in value if one not in others]

    @field_validator("messages")
    @classmethod
    def _ends_with_the_user(cls, value: list[Turn]) -> list[Turn]:
        if value and value[-1].role == "assistant":
            raise ValueError("the last message must be the user's: an answer cannot be begun for the model")
        return value

    def as_chat(self) -> ChatRequest:
        """Return the equivalent chat completion. Raises: ApiError 400."""
        return fitted(self._content(), ChatRequest)

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"model": self.model, "chat_template_kwargs": self.chat_template_kwargs}
        content["messages"] = self._instructions()
        for turn in self.messages:
            if turn.role == "system":
                remind(content["messages"], texts_of(turn.content))
            else:
                content["messages"] += turn.as_chat()
        content["tools"] = [tool.as_chat() for tool in self.tools]
        content["tool_choice"] = self.tool_choice.as_chat()
        one_at_most = self.tool_choice.disable_parallel_tool_use
        content["parallel_tool_calls"] = None if one_at_most is None else not one_at_most
        effort = self.output_config.effort
        content["reasoning_effort"] = effort and _EFFORTS.get(effort, effort)
        if self.thinking is not None:
            switch = self.thinking.type != "disabled"
            switches = dict.fromkeys(THINKING_SWITCHES, switch)
            content["chat_template_kwargs"] = {**switches, **self.chat_template_kwargs}
            content["thinking_budget"] = self.thinking.budget_tokens if switch else None
        if (form := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": form.schema_, "strict": True}
            content["response_format"] = {"type": "json_schema", "json_schema": schema}
        return content

    def _instructions(self) -> list[dict[str, Any]]:
        """Return the system prompt as a message, without the line that differs in each request."""
        text = "\n".join(filter(None, (_BILLING.sub("", block.text) for block in self.system)))
        return [{"role": "system", "content": text}] if text else []


class MessagesRequest(CountRequest, _Sampled):
    """Body of `POST /v1/messages`. None: the model's generation config decides."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: StopStrings = Field(default_factory=list)
    stream: bool = False
    speculation: Literal["on", "off"] = "on"
    metadata: User | None = None
    service_tier: Literal["auto", "standard_only"] = Field("auto", description="ignored")

    def _content(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "speculation")}
        return {**super()._content(), **same, **same_at("anthropic", self.model_dump()), "stop": self.stop_sequences}
