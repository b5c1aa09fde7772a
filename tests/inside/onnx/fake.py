"""An engine with the methods of ONNX Runtime GenAI's, around plain decoding of a table."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Next = Callable[[Sequence[int]], int]


class Flags(enum.IntFlag):
    """What an event says."""

    NONE = 0
    TOKEN = 1
    TURN_FINISHED = 2
    CAPACITY_BLOCKED = 4
    FAILED = 8


MODULE = SimpleNamespace(EngineEventFlags=Flags, __version__="0.18.0")


@dataclass(frozen=True, slots=True)
class Event:
    """One token, or one end."""

    request: FakeRequest | None
    flags: Flags
    token: int = 0


class FakeRequest:
    """A text with turns."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_left = 0
        self.num_unread = 0  # runs until its prompt is read
        self.drafts: list[int] = []
        self.refuses = False
        self.num_asked = 0
        self.num_turns = 0

    def begin_turn(self, tokens: Any, turn_options: Any = None) -> int:
        """Go on with a prompt; the options are the number of tokens to decode and of runs to read the prompt."""
        assert tokens.dtype == "int32"
        self.num_left, self.num_unread = turn_options
        self.token_ids += tokens.tolist()
        self.num_turns += 1
        return self.num_turns

    def set_draft_tokens(self, tokens: Any) -> None:
        """Take drafts, as the engine does: only where it can verify them."""
        assert tokens.dtype == "int32"
        self.num_asked += 1
        if len(tokens) and (self.refuses or self.num_unread or not self.num_left):
            raise RuntimeError("Speculative draft tokens are not supported with guidance.")
        self.drafts = tokens.tolist()


class FakeEngine:
    """Decodes every request greedily, with whatever drafts it is given."""

    def __init__(self, follow: Next, *, most: int = 5) -> None:
        self._follow, self._most = follow, most
        self.requests: list[FakeRequest] = []
        self.num_runs = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def max_draft_tokens_per_proposal(self) -> int:
        """Return the most drafts of a request."""
        return self._most

    def create_request(self) -> FakeRequest:
        """Return a request without a text."""
        request = FakeRequest()
        self.requests.append(request)
        return request

    def has_pending_requests(self) -> bool:
        """Return whether any turn is not over."""
        return any(request.num_left for request in self.requests)

    def run(self, buffer: Any) -> list[Event]:
        """Run one step of all requests."""
        self.num_runs += 1
        events: list[Event] = []
        for request in self.requests:
            if request.num_unread:
                request.num_unread -= 1
            elif request.num_left:
                *tokens, last = self._advance(request)
                events += [Event(request, Flags.TOKEN, token) for token in tokens]
                end = Flags.NONE if request.num_left else Flags.TURN_FINISHED
                events.append(Event(request, Flags.TOKEN | end, last))
        return [*events, Event(None, Flags.CAPACITY_BLOCKED)]

    def _advance(self, request: FakeRequest) -> list[int]:
        drafts, request.drafts = request.drafts, []
        assert len(drafts) <= self._most
        new_ids: list[int] = []
        for token in drafts:
            if self._follow([*request.token_ids, *new_ids]) != token:
                break
            new_ids.append(token)
        self.num_drafted += len(drafts)
        self.num_accepted += len(new_ids)
        new_ids.append(self._follow([*request.token_ids, *new_ids]))
        new_ids = new_ids[: request.num_left]
        request.token_ids += new_ids
        request.num_left -= len(new_ids)
        return new_ids
