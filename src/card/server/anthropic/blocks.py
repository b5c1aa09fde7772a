"""Turns of a conversation and their blocks in Anthropic's API, and their conversion to chat messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, field_validator, model_validator

from card.server.strict import Strict, by_kind, member

Cached = Annotated[Any, Field(None, description="ignored: the cache keeps what it has room for")]


class TextBlock(Strict):
    """A piece of text."""

    type: Literal["text"]
    text: str
    citations: list[Any] = Field(default_factory=list, description="ignored")
    cache_control: Cached


class ImageSource(Strict):
    """The place of an image, or its bytes."""

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""

    @model_validator(mode="after")
    def _has_its_content(self) -> ImageSource:
        if not (self.data if self.type == "base64" else self.url):
            raise ValueError("a source of type base64 must have data and media_type, one of type url must have url")
        return self

    @property
    def as_url(self) -> str:
        """The image as chat completions have it."""
        return self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"


class ImageBlock(Strict):
    """An image in a message of the user."""

    type: Literal["image"]
    source: ImageSource
    cache_control: Cached


class TextSource(Strict):
    """The text of a document."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str = ""
    content: str | list[TextBlock] = Field("", union_mode="left_to_right")


class DocumentBlock(Strict):
    """A document, whose text the model reads."""

    type: Literal["document"]
    source: TextSource
    title: str = ""
    context: str = ""
    citations: Any = Field(None, description="ignored")
    cache_control: Cached

    @property
    def text(self) -> str:
        """Its title, what is said of it, and its text."""
        source = self.source
        return "\n".join(filter(None, (self.title, self.context, source.data or texts_of(source.content))))


class ThinkingBlock(Strict):
    """Thoughts of the model before its answer; the chat template decides whether it reads them."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="ignored")


class RedactedBlock(Strict):
    """Thoughts that only their maker can read; they are left out."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)
    caller: Any = Field(None, description="ignored")
    cache_control: Cached


class ToolResultBlock(Strict):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] = Field(default="", union_mode="left_to_right")
    is_error: bool = False
    cache_control: Cached

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        text = texts_of(self.content)
        return f"Error: {text}" if self.is_error and not text.lower().startswith("error") else text

    @property
    def images(self) -> list[ImageBlock]:
        """The images of the result."""
        return [] if isinstance(self.content, str) else [one for one in self.content if isinstance(one, ImageBlock)]


def _kind(block: object) -> str:
    return str(block.get("type", "") if isinstance(block, dict) else getattr(block, "type", ""))


_WRONG_KIND = (
    "blocks must be of type text, image, document, thinking, redacted_thinking, tool_use or tool_result: this server "
    "runs no tools of its own"
)
ResultBlock = Annotated[
    Annotated[TextBlock, member("text")]
    | Annotated[ImageBlock, member("image")]
    | Annotated[DocumentBlock, member("document")],
    by_kind(_kind, "block_type", "blocks of a result must be of type text, image or document"),
]
Block = Annotated[
    Annotated[TextBlock, member("text")]
    | Annotated[ImageBlock, member("image")]
    | Annotated[DocumentBlock, member("document")]
    | Annotated[ThinkingBlock, member("thinking")]
    | Annotated[RedactedBlock, member("redacted_thinking")]
    | Annotated[ToolUseBlock, member("tool_use")]
    | Annotated[ToolResultBlock, member("tool_result")],
    by_kind(_kind, "block_type", _WRONG_KIND),
]
_BLOCKS: Mapping[str, tuple[type, ...]] = {
    "assistant": (TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock),
    "system": (TextBlock,),
    "user": (TextBlock, ImageBlock, DocumentBlock, ToolResultBlock),
}


def texts_of(blocks: str | Iterable[Any]) -> str:
    """Return the text of blocks, a line between two of them."""
    if isinstance(blocks, str):
        return blocks
    return "\n".join(one.text for one in blocks if isinstance(one, TextBlock | DocumentBlock))


def as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def or_text(schema: dict[str, Any]) -> None:
    """Let a field's schema accept a string."""
    listed = {name: schema.pop(name) for name in ("type", "items") if name in schema}
    schema["anyOf"] = [{"type": "string"}, listed]


class Turn(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: list[Block] = Field(fail_fast=True, json_schema_extra=or_text)

    _take_text = field_validator("content", mode="before")(as_blocks)

    @model_validator(mode="after")
    def _blocks_belong_to_the_role(self) -> Turn:
        for block in self.content:
            if not isinstance(block, _BLOCKS[self.role]):
                raise ValueError(f"blocks of type {block.type} do not belong to messages of the role {self.role}")
        return self

    def as_chat(self) -> list[dict[str, Any]]:
        """Return the turn as messages of a chat completion: a result of a call is one of its own."""
        if self.role == "assistant":
            return [self._as_answer()]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        messages: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": one.tool_use_id, "content": one.text} for one in results
        ]
        rest = [*(image for one in results for image in one.images)]
        rest += [block for block in self.content if not isinstance(block, ToolResultBlock)]  # type: ignore[misc]
        if rest or not messages:
            messages.append({"role": self.role, "content": _content(rest)})
        return messages

    def _as_answer(self) -> dict[str, Any]:
        one: dict[str, Any] = {"role": "assistant", "content": texts_of(self.content)}
        if thoughts := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            one["reasoning_content"] = thoughts
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        if calls:
            one["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": msgspec.json.encode(call.input).decode()},
                }
                for call in calls
            ]
        return one


def _content(blocks: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return blocks of the user in the shape of a chat completion."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return texts_of(blocks)
    return [
        {"type": "image_url", "image_url": {"url": block.source.as_url}}
        if isinstance(block, ImageBlock)
        else {"type": "text", "text": block.text}
        for block in blocks
    ]


def remind(messages: list[dict[str, Any]], text: str) -> None:
    """Add what the system says on the way to the user's turn, as many chat templates take it in no other place."""
    reminder = f"<system-reminder>\n{text}\n</system-reminder>"
    last = messages[-1] if messages else {}
    if last.get("role") != "user":
        messages.append({"role": "user", "content": reminder})
    elif isinstance(last["content"], str):
        last["content"] = "\n".join(filter(None, (last["content"], reminder)))
    else:
        last["content"].append({"type": "text", "text": reminder})
