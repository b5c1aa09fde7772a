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
    """One completion of a prompt.

    Attributes:
        index: its place among the `n` answers to the prompt.
        text: without the stop string that ended it.
        token_ids: of the text, the end token included.
        finish_reason: stop: an end token or stop string; length: max_tokens or the context is full; error: see
            `RequestOutput.error`.
        logprobs: of each token, if `SamplingParams.logprobs` asked for them; natural logarithms, before temperature.
        origins: of each token, the writers that proposed it, joined by "+", or how the target made it.
        alternatives: for each token, the candidates that were verified in its place, if `SamplingParams.shows_tree`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    # How the text was made, not the text, so comparisons of outputs ignore these.
    origins: tuple[str, ...] = field(default=(), compare=False)
    alternatives: tuple[tuple[Alternative, ...], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything about one finished request.

    Attributes:
        request_id: its number in this engine, from 0.
        prompt: the text; None if token ids or a conversation were given.
        prompt_token_ids: what the target read.
        outputs: the answers, `SamplingParams.n` of them.
        method: by which they were decoded.
        exact: whether the text is that of plain decoding.
        target_cost: cost and real size of a target that was inflated, else None.
        stats: counters and times, of all answers together.
        error: why a text ends early, with finish_reason "error"; else None.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    method: str
    exact: bool
    target_cost: str | None
    stats: RequestStats
    error: CardError | None = None

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
    """The text and tokens that were added to a streamed request since the last chunk.

    Attributes:
        text: that became certain; of an answer that is read in parts, its content.
        token_ids, logprobs, origins, alternatives: of the new tokens, as in `CompletionOutput`.
        finish_reason: None while the request runs; at its end as in `CompletionOutput`, or abort.
        stats: counters and times so far.
        pieces: of an answer that is read in parts: content, thoughts, calls.
        thinks: of each token of such an answer, whether it belongs to thoughts or to marks between the parts.
        stop: the stop string that ended the text, if one has.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: RequestStats
    logprobs: tuple[TokenLogprobs, ...] = ()
    origins: tuple[str, ...] = field(default=(), compare=False)
    alternatives: tuple[tuple[Alternative, ...], ...] = field(default=(), compare=False)
    pieces: tuple[Piece, ...] = ()
    thinks: tuple[bool, ...] = ()
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
