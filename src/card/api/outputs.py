"""Results of the Python API, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from card.engine.metrics import RequestStats
from card.engine.request import Alternative, FinishReason, TokenDetails, Update
from card.errors import CardError
from card.text.parts.pieces import Content, Piece
from card.tree.sampling import TokenLogprobs

__all__ = ["Alternative", "AnswerText", "CompletionOutput", "RequestOutput", "StreamChunk", "TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # the end token included
    finish_reason: FinishReason  # stop: an end token or stop string; length: max_tokens or the context is full
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if `SamplingParams.logprobs` asked for them
    # How the text was made, not the text, so comparisons of outputs ignore these; one for each token, see
    # `card.engine.request.TokenDetails`.
    origins: tuple[str, ...] = field(default=(), compare=False)
    alternatives: tuple[tuple[Alternative, ...], ...] = field(default=(), compare=False)  # if shows_tree


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything about one finished request."""

    request_id: int
    prompt: str | None  # None if token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    method: str
    exact: bool  # True: the text is that of plain decoding
    target_cost: str | None  # set if the target was inflated: its cost and its real size
    stats: RequestStats
    error: CardError | None = None  # why the text ends early, with finish_reason "error"

    @classmethod
    def of_choices(cls, choices: Sequence[RequestOutput]) -> RequestOutput:
        """Return the output of a prompt with these answers, with the counters of all of them."""
        if len(choices) == 1:
            return choices[0]
        completions = tuple(completion for one in choices for completion in one.outputs)
        error = next((one.error for one in choices if one.error is not None), None)
        stats = RequestStats.joined(one.stats for one in choices)
        return replace(choices[0], outputs=completions, error=error, stats=stats)


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text that became certain, and for an answer that is read in parts its pieces; its text is the content then."""

    text: str = ""
    pieces: tuple[Piece, ...] = ()
    thinks: tuple[bool, ...] = ()  # of each token, whether it belongs to thoughts or to marks between the parts
    stop: str = ""  # the stop string that ended the text, if one has

    def __add__(self, other: AnswerText) -> AnswerText:
        pieces, thinks = self.pieces + other.pieces, self.thinks + other.thinks
        return AnswerText(self.text + other.text, pieces, thinks, self.stop + other.stop)


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """The text and tokens that one round added to a streamed request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while the request runs
    stats: RequestStats  # live counters
    logprobs: tuple[TokenLogprobs, ...] = ()  # these three as in `CompletionOutput`, of these tokens
    origins: tuple[str, ...] = field(default=(), compare=False)
    alternatives: tuple[tuple[Alternative, ...], ...] = field(default=(), compare=False)
    pieces: tuple[Piece, ...] = ()  # of an answer that is read in parts; the text is its content then
    thinks: tuple[bool, ...] = ()  # these two as in `AnswerText`
    stop: str = ""

    @property
    def parts(self) -> tuple[Piece, ...]:
        """The pieces; a text that is not read in parts is content."""
        return self.pieces or ((Content(self.text),) if self.text else ())

    @classmethod
    def of(cls, text: AnswerText, updates: Sequence[Update]) -> StreamChunk:
        """Return the chunk of some successive rounds of a request, with the text that became certain."""
        details = TokenDetails.joined(update.details for update in updates)
        return cls(
            text.text,
            tuple([token_id for update in updates for token_id in update.token_ids]),
            updates[-1].finish_reason,
            updates[-1].stats,
            details.logprobs,
            details.origins,
            details.alternatives,
            text.pieces,
            text.thinks,
            text.stop,
        )
