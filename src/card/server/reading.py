"""Reading ahead: while a client runs its tools, the engine reads what the next prompt surely begins with.

That is the conversation with the turn just written, as the chat template renders it once another turn follows:
thoughts are gone, and calls are written again. The rows are kept as those of any finished text, so the next prompt
finds them. No text depends on it. It goes in small pieces, only while nobody is answered, and ends as soon as a request
comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from card.api.async_llm import AsyncLLM
from card.config import SamplingParams
from card.errors import CardError
from card.server.schemas import ChatRequest, Message
from card.server.tools.support import ToolSupport
from card.text.parts.pieces import Piece, Said
from card.text.prompts import Conversation

_LEAST_TOKENS = 16  # that are read by themselves: a next prompt's first pass takes fewer along
_FOLLOWING = ("0", "x")  # beginnings of the next turn, about which nothing is known
_READ = SamplingParams(max_tokens=1, temperature=0.0, seed=0, speculates=False)


class _Server(Protocol):
    """The part of the server that reading ahead needs."""

    llm: AsyncLLM
    tools: ToolSupport

    async def encode(self, prompt: Conversation) -> tuple[int, ...]:
        """Return the token ids of a conversation."""

    def is_quiet(self) -> bool:
        """Return whether nobody is being answered."""


class ReadingAhead:
    """Reads what follows the last answer. Only for the event loop."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self.num_tokens = 0  # read ahead since the start

    def begin(self, fields: ChatRequest, known: Sequence[int], pieces: Sequence[Piece], *, has_thoughts: bool) -> None:
        """Begin to read behind an answer, unless somebody is being answered.

        Args:
            known: tokens of the prompt and the answer, whose rows are kept.
            pieces: of the answer.
            has_thoughts: whether clients of this API send thoughts back.
        """
        self.stop()
        if self._server.is_quiet():
            self._task = asyncio.ensure_future(self._read(fields, known, _turn(pieces, has_thoughts=has_thoughts)))

    def stop(self) -> None:
        """End it: somebody is to be answered."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _read(self, fields: ChatRequest, known: Sequence[int], turn: Message) -> None:
        llm = self._server.llm
        with contextlib.suppress(CardError):  # such as a template that refuses the turn
            sure = _common(*[await self._encode(fields, turn, content) for content in _FOLLOWING])
            begin = len(_common(known, sure))
            if len(sure) - begin < _LEAST_TOKENS or len(sure) >= llm.max_model_len:
                return
            piece = llm.host.settings.prefill_chunk  # a request that comes waits for one at most
            for end in (*range(begin + piece, len(sure), piece), len(sure)):
                async with contextlib.aclosing(llm.generate(tuple(sure[:end]), _READ)) as stream:
                    async for _ in stream:
                        pass
                self.num_tokens += end - begin
                begin = end

    async def _encode(self, fields: ChatRequest, turn: Message, content: str) -> tuple[int, ...]:
        """Return the next prompt, if this is what the next turn says."""
        if turn.tool_calls:
            sent = [{"role": "tool", "tool_call_id": call.id, "content": content} for call in turn.tool_calls]
        else:
            sent = [{"role": "user", "content": content}]
        following = [Message.model_validate(one) for one in sent]
        asked = fields.model_copy(update={"messages": [*fields.messages, turn, *following]})
        return await self._server.encode(self._server.tools.plan(asked).conversation)


def _common(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """Return what two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((idx for idx, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _turn(pieces: Sequence[Piece], *, has_thoughts: bool) -> Message:
    """Return an answer as the turn that clients send back."""
    said = Said.by(pieces)
    calls = [
        {"id": f"call{idx:05}", "function": {"name": name, "arguments": arguments}}
        for idx, (name, arguments) in enumerate(said.calls)
    ]
    turn: dict[str, Any] = {"role": "assistant", "content": said.content, "tool_calls": calls}
    return Message.model_validate({**turn, "reasoning_content": said.thoughts if has_thoughts else ""})
