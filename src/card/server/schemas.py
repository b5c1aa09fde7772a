"""Bodies that clients may send. An unknown field is left aside or refused by name; values are not converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from card.server.custom_tools import CustomCall, OfferedCustom
from card.server.guided import GuidedFields
from card.server.sampling_fields import field_of, with_fields
from card.server.shape import MAX_CONTAINERS, containers_in
from card.server.strict import Ignored, NotDone, Strict, at_most, by_type, takes
from card.server.tool_schemas import MAX_TOOLS, NamedCustom, NamedTool, Tool, ToolCall, ToolChoice
from card.text.prompts import RESERVED_KWARGS

MAX_MESSAGES = 10_000  # each takes at least one token of the context
_MAX_PROMPTS = 2048  # of one request; the queue may allow fewer
_MAX_STOPS = 64
_MAX_BIASES = 1024
_MAX_METADATA = 16

Prompts = list[str | list[int]]
"""Prompts, each text or token ids."""

TOKEN_ID = "TokenId"  # component of `/openapi.json`: the ids of the served model
TokenId = Annotated[int, WithJsonSchema({"$ref": f"#/components/schemas/{TOKEN_ID}"})]
_TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Text = Annotated[str, Field(min_length=1)]
_Prompt = Annotated[
    _Text
    | _TokenIds
    | Annotated[list[_Text | _TokenIds], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)],
    takes(f"a string, token ids, or a list of at most {_MAX_PROMPTS} of either, none of them empty"),
]
StopStrings = Annotated[
    _Text | Annotated[list[_Text], Field(max_length=_MAX_STOPS, fail_fast=True)],
    takes(f"a string or a list of at most {_MAX_STOPS} strings, none of them empty"),
]
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": _MAX_BIASES,
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PART_SCHEMAS = [
    {"type": "object", "properties": {"type": {"const": kind}, name: {"type": "string"}}, "required": ["type", name]}
    for kind, name in _TEXT_PARTS.items()
]
_IMAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]},
    },
    "required": ["type", "image_url"],
}
_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [*_PART_SCHEMAS, _IMAGE_SCHEMA]}, "minItems": 1}]
}


def _or_unbounded(value: object) -> object:
    """Read -1, which llama.cpp's clients send, as no bound."""
    return None if type(value) is int and value == -1 else value


def _most(least: int) -> WithJsonSchema:
    """Describe a number of tokens, of which -1 sets no bound."""
    number = {"type": "integer", "minimum": least, "exclusiveMaximum": 2**31}
    return WithJsonSchema({"anyOf": [number, {"const": -1}, {"type": "null"}]})


MaxTokens = Annotated[Annotated[int, Field(ge=1, lt=2**31)] | None, BeforeValidator(_or_unbounded), _most(1)]
_MAX_KWARGS = 256
TemplateKwargs = Annotated[
    dict[str, Any],
    at_most(_MAX_KWARGS),
    WithJsonSchema(
        {"type": "object", "propertyNames": {"not": {"enum": sorted(RESERVED_KWARGS)}}, "maxProperties": _MAX_KWARGS}
    ),
]

THINKING_SWITCHES = ("enable_thinking", "thinking")  # names under which chat templates read whether to think
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


# Fields of other servers that would change the text and cannot be followed here, with the values that change nothing.
_CHANGES_TEXT: Mapping[str, tuple[object, ...]] = {
    "adapter": (),
    "add_generation_prompt": (True,),
    "audio": (),
    "continue_final_message": (False,),
    "conversation": (),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "lora": ([],),
    "lora_request": (),
    "mirostat": (0,),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (0, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "typ_p": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}


class StreamOptions(Strict):
    """Options for the end of a stream."""

    include_usage: bool = False
    include_obfuscation: NotDone = False


if TYPE_CHECKING:

    class _AtEveryDoor(Strict):
        seed: int | None

    class _AtCompletions(_AtEveryDoor):
        shows_tree: bool
        presence_penalty: float
        frequency_penalty: float
        repetition_penalty: float | None

else:
    _AtEveryDoor, _AtCompletions = with_fields(Strict, "responses"), with_fields(Strict, "completions")


class CommonFields(_AtEveryDoor):
    """The fields of all requests for text. None: the model's generation config decides."""

    changing: ClassVar[Mapping[str, tuple[object, ...]]] = _CHANGES_TEXT

    model: str = ""
    stream: bool = False
    speculation: Literal["on", "off"] = "on"
    include_metrics: bool = Field(False, description="report times and speculation in the answer")
    user: str = Field("", description="ignored, like the fields down to prompt_cache_key")
    metadata: Annotated[dict[str, str], at_most(_MAX_METADATA)] = Field(default_factory=dict, max_length=_MAX_METADATA)
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] = "auto"
    store: bool = Field(False, description="ignored: nothing is stored")
    safety_identifier: str = ""
    prompt_cache_key: str = ""


class SamplingFields(CommonFields, _AtCompletions, GuidedFields):
    """The fields that completions and chat completions share."""

    n: int = field_of("n")
    logit_bias: Annotated[dict[str, float], at_most(_MAX_BIASES), WithJsonSchema(_BIAS_SCHEMA)] = Field(
        default_factory=dict, max_length=_MAX_BIASES
    )
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024, fail_fast=True)
    stream_options: StreamOptions | None = None
    best_of: int = Field(1, ge=1, le=1, description="ignored")
    return_progress: bool = Field(False, description="a stream says how far the prompt is read")
    repeat_last_n: Annotated[Annotated[int, Field(ge=-1, lt=2**31)] | None, WithJsonSchema({"enum": [0, -1, None]})] = (
        Field(None, description="0: no penalties; -1: they look back to the beginning, as without it")
    )

    @field_validator("repeat_last_n")
    @classmethod
    def _look_back_all_the_way_or_not_at_all(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 0, -1):
            if not isinstance(info.context, Ignored):
                raise ValueError("may be 0 or -1: penalties look back to the beginning; leave it out")
            info.context.note("repeat_last_n")
        return value

    @model_validator(mode="after")
    def _no_look_back_is_no_penalty(self) -> SamplingFields:
        if self.repeat_last_n == 0:
            self.repetition_penalty, self.presence_penalty, self.frequency_penalty = 1.0, 0.0, 0.0
        return self

    @property
    def includes_usage(self) -> bool:
        """True if the stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


def _part(part: object) -> dict[str, Any]:
    """Return a content part without fields that clients add, such as the detail of an image."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if isinstance(part, dict) and name is not None:
        if not isinstance(part.get(name), str):
            raise ValueError(f"a part of type {kind} must have a string named {name}, got {str(part.get(name))[:40]}")
        return {"type": "text", "text": part[name]}
    if isinstance(part, dict) and kind == "image_url":
        source = part.get("image_url")
        if isinstance(source, dict) and isinstance(source.get("url"), str):
            return {"type": "image_url", "image_url": {"url": source["url"]}}
        raise ValueError('a part of type image_url must have {"image_url": {"url": "data:image/png;base64,..."}}')
    raise ValueError(f"only parts of type text and image_url are supported, got {str(kind)[:40]!r}")


class AnsweredFields(Strict):
    """Parts of answers other than text, which clients send back. The chat template gets only the reasoning."""

    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    annotations: list[Any] = Field(default_factory=list, description="ignored, like the fields below")
    provider_specific_fields: dict[str, Any] = Field(default_factory=dict)
    parsed: Any = None


class Message(AnsweredFields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # A list only with images among its parts, in the shape of `card.text.prompts.split_images`.
    content: Annotated[
        str | list[dict[str, Any]], WithJsonSchema(_CONTENT_SCHEMA), takes("a string or a list of parts")
    ] = Field(None, validate_default=True)
    name: str | None = None
    tool_calls: list[Annotated[ToolCall | CustomCall, by_type(ToolCall, CustomCall)]] = Field(
        default_factory=list, max_length=MAX_TOOLS, fail_fast=True
    )
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _take_parts(cls, value: object, info: ValidationInfo) -> object:
        if value is None and info.data.get("role") == "assistant":
            return info.data.get("refusal") or ""  # without a refusal, a turn of calls only
        if not isinstance(value, list):
            return value
        if not value:
            raise ValueError("must be a string or a list of at least one part, got an empty list")
        parts = [_part(part) for part in value]
        if any(part["type"] == "image_url" for part in parts):
            if info.data.get("role") != "user":
                raise ValueError("images belong to messages of the role user")
            return parts
        return "\n".join(part["text"] for part in parts)

    @model_validator(mode="after")
    def _belongs_to_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id belongs to messages of the role tool")
        return self


class Prediction(Strict):
    """A text that the answer may repeat."""

    type: Literal["content"]
    content: Annotated[
        str, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": _PART_SCHEMAS}}]})
    ]

    @field_validator("content", mode="before")
    @classmethod
    def _take_parts(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        parts = [_part(part) for part in value]
        if any(part["type"] != "text" for part in parts):
            raise ValueError("a prediction has parts of type text only")
        return "".join(part["text"] for part in parts)


Messages = Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    spelling: ClassVar[Mapping[str, str]] = {"prompt": "messages"}

    messages: Messages = Field(min_length=1)
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Annotated[Tool | OfferedCustom, by_type(Tool, OfferedCustom)]] = Field(
        default_factory=list, max_length=MAX_TOOLS, fail_fast=True
    )
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = Field(None, description="by default several calls, one if they are required")
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    reasoning_effort: Effort | None = Field(None, description="passed to the chat template; none: no thoughts")
    thinking_budget: int | None = Field(None, ge=0, lt=2**31, description="most tokens of thoughts")
    prediction: Prediction | None = Field(None, description="a text that the answer may repeat: it comes faster then")
    modalities: list[Literal["text"]] = Field(default_factory=list, max_length=8, fail_fast=True)

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools whose input is one text."""
        return frozenset(tool.custom.name for tool in self.tools if isinstance(tool, OfferedCustom))

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leave_the_rest_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in RESERVED_KWARGS:
                raise ValueError(f"{name} cannot be set by clients; leave it out")
        return value

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _arguments_keep_to_the_bounds_of_a_body(self) -> ChatRequest:
        calls = [call for message in self.messages for call in message.tool_calls]
        if sum(containers_in(call.function.arguments) for call in calls) > MAX_CONTAINERS:
            raise ValueError(f"the arguments of all tool_calls may have at most {MAX_CONTAINERS} objects and lists")
        return self

    @model_validator(mode="after")
    def _choice_is_among_the_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: each function needs a different name")
        if self.tool_choice == "required" and not names:
            raise ValueError('tool_choice "required" needs tools')
        if isinstance(self.tool_choice, NamedTool | NamedCustom) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name[:64]
            raise ValueError(f"tool_choice names {name!r}, which is not among the tools")
        return self


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    prompt: _Prompt
    suffix: str = Field("", description="the text behind the gap that the answer fills")
    max_tokens: Annotated[Annotated[int, Field(ge=0, lt=2**31)] | None, BeforeValidator(_or_unbounded), _most(0)] = 16
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _writes_or_echoes(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be 1 or more without echo")
        if self.suffix and self.echo:
            raise ValueError("suffix cannot be combined with echo; leave one out")
        return self

    @property
    def prompts(self) -> Prompts:
        """All prompts, as a list."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return cast(Prompts, [self.prompt])
        return self.prompt


class TokenizeRequest(Strict):
    """Body of `POST /tokenize`: a prompt, or a conversation for the chat template."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model: str = ""
    tokens: list[TokenId] = Field(fail_fast=True)
