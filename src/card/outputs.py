"""What the Python API gives back, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass

from card.errors import CardError
from card.metrics import RequestStats
from card.target import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # the end token included
    finish_reason: FinishReason  # stop: an end token or stop string; length: max_tokens or the context is full


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything about one finished request."""

    request_id: int
    prompt: str | None  # None if token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    method: str
    exact: bool  # True: the text is that of plain decoding
    target_cost: str | None  # set if the target was inflated: what it costs and what it is
    stats: RequestStats
    error: CardError | None = None  # why the text ends early, with finish_reason "error"


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one round added to a streamed request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while the request runs
    stats: RequestStats  # live counters
