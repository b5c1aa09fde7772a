"""`POST /v1/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.config import SamplingParams
from card.models.text import decode
from card.server.answers import event, json_response
from card.server.limits import read_body
from card.server.params import sampling_params
from card.server.schemas import CompletionRequest, Prompts
from card.server.service import Choice, Generation, Service
from card.server.streaming import EventStream, unless_gone
from card.tree.sampling import TokenLogprobs

Job = tuple[tuple[int, ...], SamplingParams | None]


_Echo = tuple[str, Sequence[TokenLogprobs | int]]  # a prompt as it is repeated; its first token has no log-probability


async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    service: Service = request.app.state.service
    fields = await read_body(request, CompletionRequest)
    service.check_model(fields.model)
    prompts = fields.prompts
    jobs = [await _job(service, fields, prompt) for prompt in prompts]
    generation = service.start(fields, jobs)
    request.state.generation = generation
    try:
        echoes = await unless_gone(request, _echo(service, fields, prompts, jobs, generation))
        if fields.stream:
            return EventStream(generation, _events(service, fields, generation, echoes))
        await unless_gone(request, generation.collect())
    except BaseException:
        await generation.close()
        raise
    await generation.close()
    choices = [_choice(service, fields, choice, echoes) for choice in generation.choices]
    return json_response(generation.answer("cmpl", "text_completion", choices))


async def _job(service: Service, fields: CompletionRequest, prompt: str | list[int]) -> Job:
    prompt_ids = await service.encode(prompt)
    if fields.max_tokens == 0:
        service.llm.host.scorer.check(prompt_ids)
        return prompt_ids, None
    params = sampling_params(
        fields,
        service.defaults,
        max_tokens=service.num_new_tokens(len(prompt_ids), fields.max_tokens),
        logprobs=fields.logprobs,
        vocab_size=service.vocab_size,
    )
    await service.prepare(params.grammar, fields.guide)
    return prompt_ids, params


async def _echo(
    service: Service, fields: CompletionRequest, prompts: Prompts, jobs: Sequence[Job], generation: Generation
) -> Sequence[_Echo]:
    """Return the prompts as text, and how likely their tokens are if that is asked for."""
    if not fields.echo:
        return [("", ())] * len(jobs)
    echoes: list[_Echo] = []
    async with generation.deadline:
        for one, (prompt_ids, _) in zip(prompts, jobs, strict=True):
            text = one if isinstance(one, str) else await service.aside(False, decode, service.tokenizer, one)
            told: list[TokenLogprobs | int] = []
            if fields.logprobs is not None:
                told = [prompt_ids[0], *await service.llm.score(prompt_ids, fields.logprobs)]
            echoes.append((text, told))
    return echoes


def _choice(service: Service, fields: CompletionRequest, choice: Choice, echoes: Sequence[_Echo]) -> dict[str, Any]:
    echoed, scores = echoes[choice.index // fields.n]
    told = [token for chunk in choice.chunks for token in chunk.logprobs]
    logprobs = service.names.completion_logprobs([*scores, *told], 0)
    return {
        "index": choice.index,
        "text": echoed + choice.text,
        "logprobs": None if fields.logprobs is None else logprobs,
        "finish_reason": choice.finish_reason,
        **({"tokens": service.names.provenance(choice.chunks)} if fields.shows_tree else {}),
    }


async def _events(
    service: Service, fields: CompletionRequest, generation: Generation, echoes: Sequence[_Echo]
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events, those of a prompt that is echoed first."""
    head = generation.head("cmpl", "text_completion")
    held_back: dict[int, list[TokenLogprobs]] = {}  # of tokens whose text has not come yet
    offsets = [0] * len(generation.choices)  # characters that the tokens told of so far have

    def piece(choice: Choice, text: str, told: Sequence[TokenLogprobs | int], reason: str | None, **more: Any) -> bytes:
        logprobs = None
        if fields.logprobs is not None:
            logprobs = service.names.completion_logprobs(told, offsets[choice.index])
            offsets[choice.index] += sum(map(len, logprobs["tokens"]))
        content = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason, **more}
        return event({**head, "choices": [content]})

    for choice in generation.choices if fields.echo else ():
        yield piece(choice, *echoes[choice.index // fields.n], "length" if choice.stream is None else None)
    async with contextlib.aclosing(generation.events()) as pieces:
        async for choice, chunk in pieces:
            logprobs = [*held_back.pop(choice.index, ()), *chunk.logprobs]
            if not chunk.text and chunk.finish_reason is None and not fields.shows_tree:
                held_back[choice.index] = logprobs
                continue
            more = {"tokens": service.names.provenance([chunk])} if fields.shows_tree else {}
            yield piece(choice, chunk.text, logprobs, chunk.finish_reason, **more)
    if told := generation.last_event(head):
        yield told
