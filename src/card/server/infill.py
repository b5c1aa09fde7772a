"""`POST /infill`: a gap in a file, in the shape of llama-server, which editors ask."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.api.outputs import StreamChunk
from card.server.answers import event, json_response
from card.server.bodies import read_body
from card.server.filling import filled, with_ends
from card.server.generation import Choice, Generation, generate
from card.server.infill_schemas import InfillRequest
from card.server.params import sampling_params
from card.server.service import Service
from card.server.streaming import EventStream
from card.text.infill import FilledPrompt, OtherFile

_ANSWER_SHARE = 4  # one part in so many of the context is kept for the answer where other files could fill it


async def infill(request: Request) -> Response:
    """Fill a gap."""
    service: Service = request.app.state.service
    fields = await read_body(request, InfillRequest)
    service.check_model(fields.model)
    prompt = await _prompt(service, fields)
    most = service.num_new_tokens(len(prompt.token_ids), None if fields.n_predict is None else max(1, fields.n_predict))
    params = sampling_params(fields, max_tokens=most, logprobs=None, vocab_size=service.vocab_size)
    await service.prepare(request, params.grammar, fields.guide)
    jobs = [(prompt.token_ids, with_ends(service, params))]
    generation = generate(service, request.state.arrival, fields, jobs)
    request.state.generation = generation
    writer = _Writer(service, fields, prompt, generation)
    if fields.stream:
        return EventStream(generation, writer.events(), end=b"")
    await generation.collect(request)
    for choice in generation.choices:
        for chunk in choice.chunks:
            writer.texts[choice.index].add(chunk)
    answers = [writer.answer(choice) for choice in generation.choices]
    return json_response(answers[0] if fields.n == 1 else answers)


async def _prompt(service: Service, fields: InfillRequest) -> FilledPrompt:
    others = [OtherFile(one.filename, one.text) for one in fields.input_extra]
    most = service.llm.max_model_len
    num_answer = most // _ANSWER_SHARE
    room = most - (num_answer if fields.n_predict is None else min(num_answer, fields.n_predict))
    return await filled(
        service,
        fields.input_prefix + fields.prompt,
        fields.input_suffix,
        others,
        room=room,
        param="input_prefix",
    )


@dataclass(slots=True)
class _Text:
    """Facts of one text, told at its end."""

    has_new_line: bool = False
    last_id: int | None = None

    def add(self, chunk: StreamChunk) -> None:
        self.has_new_line |= "\n" in chunk.text
        self.last_id = chunk.token_ids[-1] if chunk.token_ids else self.last_id


class _Writer:
    """Makes the answers of a request, whole or in events."""

    def __init__(self, service: Service, fields: InfillRequest, prompt: FilledPrompt, generation: Generation) -> None:
        self._service, self._fields, self._prompt, self._generation = service, fields, prompt, generation
        self.texts = [_Text() for _ in generation.choices]
        self._writes = fields.n_predict != 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the text as it comes; the last event of each text has its figures."""
        async with contextlib.aclosing(self._generation.events()) as pieces:
            async for choice, chunk in pieces:
                self.texts[choice.index].add(chunk)
                if chunk.text and self._writes:
                    yield event({**self._counts(choice), "content": chunk.text, "stop": False})
                if chunk.finish_reason is not None:
                    choice.record.finish_reason = chunk.finish_reason
                    yield event({**self.answer(choice), "content": ""})

    def _counts(self, choice: Choice) -> dict[str, Any]:
        num_new = choice.record.stats.num_new_tokens if self._writes else 0
        return {"index": choice.index, "tokens_predicted": num_new, "tokens_evaluated": len(choice.prompt_ids)}

    def answer(self, choice: Choice) -> dict[str, Any]:
        """Return an answer; of it only the fields that were asked for, if any were."""
        answer = {
            **self._counts(choice),
            "content": choice.text if self._writes else "",
            "stop": True,
            "stop_type": self._stop_type(choice),
            "model": self._service.check_model(self._fields.model),
            "has_new_line": self._writes and self.texts[choice.index].has_new_line,
            "truncated": self._prompt.num_left_out > 0,
            "tokens_cached": len(choice.prompt_ids) + choice.record.stats.num_new_tokens,
            "generation_settings": {"n_ctx": self._service.llm.max_model_len},
            "timings": _timings(choice),
            **self._generation.metrics(),
        }
        wanted = self._fields.response_fields
        chosen = {path: _at(answer, path.split("/")) for path in wanted}
        return {path: value for path, value in chosen.items() if value is not None} if wanted else answer

    def _stop_type(self, choice: Choice) -> str:
        if choice.record.finish_reason != "stop":
            return "limit"
        maker, last_id = self._service.infill, self.texts[choice.index].last_id
        is_end = last_id in self._service.llm.host.end_ids or (maker is not None and last_id in maker.end_ids)
        return "eos" if is_end else "word"


def _timings(choice: Choice) -> dict[str, float]:
    """Return the times of a text by llama-server's names; those of the prompt are of what was read of it."""
    stats = choice.record.stats
    timings: dict[str, float] = {"cache_n": stats.reused_prompt_tokens}
    num_read = stats.num_prompt_tokens - stats.reused_prompt_tokens
    for name, count, seconds in (
        ("prompt", num_read, stats.prefill_s),
        ("predicted", stats.num_new_tokens, stats.decode_s),
    ):
        timings |= {
            f"{name}_n": count,
            f"{name}_ms": 1e3 * seconds,
            f"{name}_per_token_ms": 1e3 * seconds / max(1, count),
            f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
        }
    return timings


def _at(value: Any, path: Sequence[str]) -> Any:
    """Return what stands under nested names; None if nothing does."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
