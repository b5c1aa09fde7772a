"""`POST /v1/completions`."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.api.mailbox import logprob_bytes
from card.api.outputs import StreamChunk
from card.config import SamplingParams
from card.server.answers import event, json_response
from card.server.bodies import read_body, run_apart
from card.server.errors import too_long
from card.server.filling import filled, with_ends
from card.server.generation import Choice, Generation, generate
from card.server.offsets import TokenOffsets, offsets_in
from card.server.params import sampling_params
from card.server.schemas import CompletionRequest, Prompts
from card.server.service import LONG_CHARS, Service
from card.server.streaming import EventStream
from card.server.waiting import unless_gone
from card.text.tokens import decode, decode_prompt
from card.tree.sampling import TokenLogprobs

Job = tuple[tuple[int, ...], SamplingParams | None]


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt that the answer repeats."""

    text: str = ""
    scores: Sequence[TokenLogprobs | int] = ()  # the first token has no log-probability
    offsets: Sequence[int] = ()


async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    service: Service = request.app.state.service
    fields = await read_body(request, CompletionRequest)
    service.check_model(fields.model)
    prompts = fields.prompts
    jobs = [await completion_job(request, service, fields, prompt) for prompt in prompts]
    generation = generate(service, request.state.arrival, fields, jobs)
    request.state.generation = generation
    try:
        echoes = await unless_gone(request, _echo(request, service, fields, prompts, jobs))
        if fields.stream:
            head = generation.stream_head("cmpl", "text_completion")
            return EventStream(generation, _events(request, fields, generation, echoes, head), head=head)
        await generation.collect(request)
    except BaseException:
        await generation.close()
        raise
    num_echoed = fields.n * sum(len(echo.scores) for echo in echoes)
    request.state.is_large = generation.is_large(fields.logprobs, num_echoed)
    return await run_apart(request, _answer, service, fields, generation, echoes)


async def completion_job(
    request: Request, service: Service, fields: CompletionRequest, prompt: str | list[int], *, guide: str = ""
) -> Job:
    """Return one prompt of a request with its parameters; None for a prompt that is only echoed.

    Args:
        guide: the field that fixes the form of the answer, if the request has another name for it.
    Raises: ApiError, PromptError, SettingsError.
    """
    if fields.suffix:
        prompt_ids = (await filled(service, prompt, fields.suffix)).token_ids
    else:
        prompt_ids = await service.encode(prompt)
    if fields.max_tokens == 0:
        if len(prompt_ids) > service.llm.max_model_len:
            raise too_long(service.llm.max_model_len, len(prompt_ids), 0)
        service.llm.host.scorer.check(prompt_ids)
        return prompt_ids, None
    is_asked = "max_tokens" in fields.model_fields_set
    params = sampling_params(
        fields,
        max_tokens=service.num_new_tokens(len(prompt_ids), fields.max_tokens, is_asked=is_asked),
        logprobs=fields.logprobs,
        vocab_size=service.vocab_size,
    )
    if fields.suffix:
        params = with_ends(service, params)
    await service.prepare(request, params.grammar, guide or fields.guide)
    return prompt_ids, params


async def _echo(
    request: Request, service: Service, fields: CompletionRequest, prompts: Prompts, jobs: Sequence[Job]
) -> Sequence[_Echo]:
    """Return the prompts as text, with the log-probabilities of their tokens if requested."""
    if not fields.echo:
        return [_Echo()] * len(jobs)
    echoes: list[_Echo] = []
    for one, (prompt_ids, params) in zip(prompts, jobs, strict=True):
        tokenizer = service.tokenizer
        to_text = decode if params is None else decode_prompt
        text = one if isinstance(one, str) else await service.run_in_thread(False, to_text, tokenizer, prompt_ids)
        if fields.logprobs is None:
            echoes.append(_Echo(text))
            continue
        scores: list[TokenLogprobs | int] = [prompt_ids[0], *await service.llm.score(prompt_ids, fields.logprobs)]
        service.arrivals.hold(request.state.arrival, logprob_bytes(len(scores), fields.logprobs))
        offsets = await service.run_in_thread(len(prompt_ids) >= LONG_CHARS, offsets_in, tokenizer, prompt_ids, text)
        echoes.append(_Echo(text, scores, offsets))
    return echoes


class _Scores:
    """The log-probabilities of one choice's tokens; each is sent once its place in the text is known."""

    def __init__(self, service: Service, choice: Choice, echo: _Echo) -> None:
        self._names = service.names
        self._places = TokenOffsets(service.tokenizer, after=choice.prompt_ids, start=len(echo.text))
        self._num_chars = len(echo.text)  # of the text so far
        self._waiting = list(echo.scores)
        self._offsets = list(echo.offsets)  # of the first waiting tokens

    def add_chunk(self, chunk: StreamChunk) -> None:
        """Add new text and tokens."""
        self._num_chars += len(chunk.text)
        self._waiting += chunk.logprobs
        self._offsets += self._places.push(token.token_id for token in chunk.logprobs)

    def pop_placed(self, *, is_end: bool) -> dict[str, list[Any]]:
        """Return the `logprobs` of tokens that begin in the text so far; at the end, of all remaining tokens."""
        if is_end:
            self._offsets += self._places.flush()
        num_told = len(self._offsets) if is_end else bisect_right(self._offsets, self._num_chars)
        sent, self._waiting = self._waiting[:num_told], self._waiting[num_told:]
        offsets, self._offsets = self._offsets[:num_told], self._offsets[num_told:]
        # Tokens of a stop string, which the text leaves out, begin where it ends.
        return self._names.completion_logprobs(sent, [min(offset, self._num_chars) for offset in offsets])


def _answer(service: Service, fields: CompletionRequest, generation: Generation, echoes: Sequence[_Echo]) -> Response:
    choices = [_choice(service, fields, choice, echoes) for choice in generation.choices]
    return json_response(generation.answer("cmpl", "text_completion", choices))


def _choice(service: Service, fields: CompletionRequest, choice: Choice, echoes: Sequence[_Echo]) -> dict[str, Any]:
    echo = echoes[choice.index // fields.n]
    logprobs = None
    if fields.logprobs is not None:
        scores = _Scores(service, choice, echo)
        for chunk in choice.chunks:
            scores.add_chunk(chunk)
        logprobs = scores.pop_placed(is_end=True)
    return {
        "index": choice.index,
        "text": echo.text + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        **({"tokens": service.names.provenance(choice.chunks)} if fields.shows_tree else {}),
    }


async def _events(
    request: Request, fields: CompletionRequest, generation: Generation, echoes: Sequence[_Echo], head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events, an echoed prompt first."""
    service: Service = request.app.state.service
    scores = [_Scores(service, choice, echoes[choice.index // fields.n]) for choice in generation.choices]

    def piece(choice: Choice, text: str, reason: str | None, **more: Any) -> bytes:
        logprobs = scores[choice.index].pop_placed(is_end=reason is not None) if fields.logprobs is not None else None
        content = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason, **more}
        return event({**head, "choices": [content]})

    for choice in generation.choices if fields.echo else ():
        echo = echoes[choice.index // fields.n]
        request.state.is_large = generation.is_large(fields.logprobs, len(echo.scores))
        yield await run_apart(request, piece, choice, echo.text, "length" if choice.stream is None else None)
    async with contextlib.aclosing(generation.events()) as pieces:
        async for choice, chunk in pieces:
            scores[choice.index].add_chunk(chunk)
            if not chunk.text and chunk.finish_reason is None and not fields.shows_tree:
                continue
            more = {"tokens": service.names.provenance([chunk])} if fields.shows_tree else {}
            yield piece(choice, chunk.text, chunk.finish_reason, **more)
    if last := generation.last_event(head):
        yield last
