"""The texts of one API request, from admission until the answer is sent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from card import __version__
from card.api.async_llm import RequestStream
from card.api.outputs import StreamChunk
from card.config import SamplingParams
from card.config.sampling import derived_seed
from card.engine.request import FinishReason
from card.errors import CardError
from card.server.answers import event
from card.server.arrivals import Arrival
from card.server.errors import shutting_down
from card.server.metrics import TextRecord, request_metrics
from card.server.prediction import Repeated
from card.server.schemas import SamplingFields
from card.server.service import Service
from card.server.waiting import unless_gone
from card.text.parts.pieces import Piece
from card.text.parts.view import AnswerView

_MANY_LOGPROBS = 5000  # of an answer; each takes microseconds


@dataclass(slots=True)
class Choice:
    """One text of a request: its stream, and the chunks collected from it."""

    index: int
    prompt_ids: tuple[int, ...]
    stream: RequestStream | None  # None: no text, only the prompt is echoed
    record: TextRecord
    chunks: list[StreamChunk] = field(default_factory=list)  # if they are collected
    num_thoughts: int = 0  # tokens so far
    token_ids: list[int] = field(default_factory=list)  # these two of the text so far, if somebody listens to its end
    pieces: list[Piece] = field(default_factory=list)
    repeated: Repeated | None = None  # of the request's prediction, if there is one

    @property
    def text(self) -> str:
        """The collected text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the collected text ends."""
        return (self.chunks[-1].finish_reason if self.chunks else None) or "length"


class Generation:
    """All texts of one API request, from admission until the answer is sent."""

    def __init__(
        self,
        service: Service,
        arrival: Arrival,
        ticket: object,
        fields: SamplingFields,
        choices: Sequence[Choice],
        view: AnswerView | None = None,
    ) -> None:
        self.tell_end: Callable[[Choice], None] | None = None  # gets a text that ended by itself, its place being free
        self.choices, self.arrival, self._view = choices, arrival, view
        self._service, self._ticket, self._fields = service, ticket, fields
        self.ping_interval_s = service.settings.ping_interval_s
        self._is_closed = False
        self._began_at = time.monotonic()

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the first fields of the answer."""
        lossy = {} if self._service.llm.is_exact else {"exact": False}
        return {
            **lossy,
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._service.check_model(self._fields.model),
            "system_fingerprint": f"card-{__version__}-{self._service.llm.method.name}",
        }

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens; a prompt counts once, whatever the number of its texts."""
        prompts = self.choices[:: self._fields.n]
        num_prompt = sum(len(choice.prompt_ids) for choice in prompts)
        num_new = sum(choice.record.stats.num_new_tokens for choice in self.choices)
        cached = sum(choice.record.stats.reused_prompt_tokens for choice in prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": cached},
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        """Return how many tokens were thoughts or predicted, where that is known: {} or {"completion_..."."""
        counted: dict[str, int] = {}
        if self._view is not None:
            counted["reasoning_tokens"] = sum(choice.num_thoughts for choice in self.choices)
        counts = [choice.repeated for choice in self.choices if choice.repeated is not None]
        if counts:
            counted["accepted_prediction_tokens"] = sum(one.num_repeated for one in counts)
            counted["rejected_prediction_tokens"] = sum(one.num_others for one in counts)
        return {"completion_tokens_details": counted} if counted else {}

    def metrics(self) -> dict[str, Any]:
        """Return the `metrics` of the answer, if requested: {} or {"metrics": ...}."""
        if not self._fields.include_metrics and self._service.settings.spec_metrics == "none":
            return {}
        budget = self._service.llm.host.draft_settings.budget
        return {"metrics": request_metrics([one.record for one in self.choices if one.stream is not None], budget)}

    def answer(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer that is not streamed."""
        return {**self.head(prefix, kind), "choices": choices, "usage": self.usage(), **self.metrics()}

    def is_large(self, num_top: int | None, num_echoed: int = 0) -> bool:
        """Return whether an answer lists so many tokens that building it would delay other requests.

        Args:
            num_top: log-probabilities listed beside that of each token; None: none at all.
            num_echoed: tokens of prompts that are listed too, for all choices together.
        """
        num_told = num_echoed + sum(choice.record.stats.num_new_tokens for choice in self.choices)
        return num_top is not None and num_told * (1 + num_top) >= _MANY_LOGPROBS

    def stream_head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the first fields of every event; the usage is null until the last event."""
        return {**self.head(prefix, kind), **({"usage": None} if self._fields.includes_usage else {})}

    def last_event(self, head: dict[str, Any]) -> bytes:
        """Return the event at the end of a stream with usage and metrics; empty if neither is requested."""
        tail = {"usage": self.usage()} if self._fields.includes_usage else {}
        tail |= self.metrics()
        return event({**head, "choices": [], **tail}) if tail else b""

    @property
    def tells_progress(self) -> bool:
        """True if the client wants to know how far its prompt is read."""
        return self._fields.return_progress

    def progress(self) -> dict[str, int] | None:
        """Return how far the prompts are read, in llama.cpp's words; None once an answer has begun."""
        streams = [one.stream for one in self.choices if one.stream is not None]
        if any(one.record.stats.num_new_tokens for one in self.choices):
            return None
        read = [one.num_read for one in streams]
        return {
            "total": sum(len(one.prompt_ids) for one in self.choices),
            "cache": sum(num_reused for _, num_reused in read),
            "processed": sum(num_read for num_read, _ in read),
            "time_ms": round(1000 * (time.monotonic() - self._began_at)),
        }

    async def events(self) -> AsyncGenerator[tuple[Choice, StreamChunk], None]:
        """Yield the chunks of all choices as they come. Raises: CardError."""
        written = [choice for choice in self.choices if choice.stream is not None]
        source = _read(written[0]) if len(written) == 1 else _merged(written)
        async with contextlib.aclosing(source):
            async for choice, chunk in source:
                self.arrival.deadline.begin_answer()
                choice.num_thoughts += sum(chunk.thinks)
                if self.tell_end is not None:
                    choice.token_ids += chunk.token_ids
                    choice.pieces += chunk.parts
                if choice.repeated is not None:
                    choice.repeated.push(chunk.token_ids)
                yield choice, chunk

    async def collect(self, request: Request) -> None:
        """Wait for all texts, which are in the choices' `chunks` then, and close.

        Raises: CardError; ApiError if the client disconnects meanwhile.
        """
        try:
            await unless_gone(request, self._collected())
        finally:
            await self.close()

    async def _collected(self) -> None:
        async with contextlib.aclosing(self.events()) as events:
            async for choice, chunk in events:
                choice.chunks.append(chunk)

    async def close(self) -> None:
        """End running texts, free the place and record the figures. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for choice in self.choices:
            self._service.ledger.end(choice.record)
            if choice.stream is not None:
                await choice.stream.aclose()
        self._service.gate.leave(self._ticket)
        if self.tell_end is not None and len(self.choices) == 1 and self.choices[0].record.finish_reason == "stop":
            self.tell_end(self.choices[0])


def generate(
    service: Service,
    arrival: Arrival,
    fields: SamplingFields,
    jobs: Sequence[tuple[tuple[int, ...], SamplingParams | None]],
    view: AnswerView | None = None,
    prediction: Sequence[int] | None = None,
) -> Generation:
    """Queue the texts of a request: `n` of each job, in this order; a job without parameters writes no text.

    Args:
        view: how the texts are read in parts; None: each is one text.
        prediction: tokens that they may repeat; None: the request predicts nothing.
    Raises: ApiError 429 if they are not admitted; PromptError, SettingsError, WorkerError.
    """
    service.ahead.stop()
    ticket = service.gate.enter(len(jobs) * fields.n, arrival.client)
    choices: list[Choice] = []
    try:
        for prompt_ids, params in jobs:
            for choice_idx in range(fields.n):
                stream = None
                if params is not None:
                    assert params.seed is not None
                    choice_params = params.replace(seed=derived_seed(params.seed, choice_idx))
                    stream = service.llm.generate(prompt_ids, choice_params, view=view, prediction=prediction or ())
                    stream.tell_unread(functools.partial(service.arrivals.hold, arrival))
                speculates = fields.speculation == "on"
                record = service.ledger.begin(len(prompt_ids), speculates=speculates, is_first=choice_idx == 0)
                if stream is None:
                    record.finish_reason = "length"
                repeated = None if prediction is None else Repeated(prediction)
                choices.append(Choice(len(choices), prompt_ids, stream, record, repeated=repeated))
    except BaseException:
        for choice in choices:
            service.ledger.forget(choice.record)
        service.gate.leave(ticket)  # dropping the streams ends them
        raise
    return Generation(service, arrival, ticket, fields, choices, view)


async def _read(choice: Choice) -> AsyncGenerator[tuple[Choice, StreamChunk], None]:
    assert choice.stream is not None
    try:
        async for chunk in choice.stream:
            choice.record.add_chunk(chunk)
            if chunk.finish_reason == "abort":
                raise shutting_down()
            yield choice, chunk
    except CardError:
        choice.record.finish_reason = "error"
        raise


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, StreamChunk], None]:
    # What nobody reads stays in the streams, which count it.
    arrived: asyncio.Queue[tuple[Choice, StreamChunk] | Exception | None] = asyncio.Queue(len(choices))

    async def pump(choice: Choice) -> None:
        try:
            async for item in _read(choice):
                await arrived.put(item)
            await arrived.put(None)
        except Exception as error:  # raised again by the reader, which would wait for good
            await arrived.put(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        num_left = len(tasks)
        while num_left:
            item = await arrived.get()
            if item is None:
                num_left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
