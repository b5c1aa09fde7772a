"""`POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from card.api.outputs import StreamChunk
from card.server.answers import event, json_response
from card.server.bodies import read_body, run_apart
from card.server.custom_tools import InputText
from card.server.generation import Choice, Generation, generate
from card.server.params import sampling_params
from card.server.prediction import predicted
from card.server.schemas import ChatRequest
from card.server.service import Service
from card.server.streaming import EventStream
from card.server.tools.support import ToolPlan
from card.text.parts.pieces import CallArguments, CallBegun, Content, Piece, Said, Thoughts
from card.tree.sampling import TokenLogprobs


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    fields = await read_body(request, ChatRequest)
    service.check_model(fields.model)
    plan = await run_apart(request, service.tools.plan, fields)
    generation = await start_chat(request, service, fields, plan)
    if fields.stream:
        head = generation.stream_head("chatcmpl", "chat.completion.chunk")
        return EventStream(generation, _events(service, fields, plan, generation, head), head=head)
    await generation.collect(request)
    request.state.is_large = generation.is_large((fields.top_logprobs or 0) if fields.logprobs else None)
    return await run_apart(request, _answer, service, fields, plan, generation)


async def count_prompt_tokens(request: Request, service: Service, fields: ChatRequest) -> int:
    """Return the number of tokens of a conversation, which need not fit. Raises: ApiError, PromptError."""
    plan = await run_apart(request, service.tools.plan, fields)
    num_tokens = len(await service.encode(plan.conversation, must_fit=False))
    if num_tokens < service.llm.max_model_len:  # else only the count is of use
        service.num_new_tokens(num_tokens, fields.max_completion_tokens or fields.max_tokens)
    return num_tokens


async def start_chat(
    request: Request, service: Service, fields: ChatRequest, plan: ToolPlan, *, has_thoughts: bool = False
) -> Generation:
    """Queue the texts that answer a conversation. Raises: ApiError, PromptError, SettingsError, WorkerError.

    Args:
        has_thoughts: whether clients of this API send thoughts back.
    """
    if fields.max_completion_tokens is not None:
        request.state.spelling = {"max_tokens": "max_completion_tokens", **request.state.spelling}
    prompt_ids = await service.encode(plan.conversation)
    grammar = plan.grammar(prompt_ids)
    params = sampling_params(
        fields,
        max_tokens=service.num_new_tokens(len(prompt_ids), fields.max_completion_tokens or fields.max_tokens),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        vocab_size=service.vocab_size,
    ).replace(grammar=grammar)
    await service.prepare(request, grammar, plan.grammar_param)
    generation = generate(
        service,
        request.state.arrival,
        fields,
        [(prompt_ids, params)],
        plan.view(prompt_ids),
        None if fields.prediction is None else await predicted(service, fields.prediction.content),
    )
    request.state.generation = generation

    def read_ahead(choice: Choice) -> None:
        known = (*prompt_ids, *choice.token_ids)
        service.ahead.begin(fields, known, choice.pieces, has_thoughts=has_thoughts)

    generation.tell_end = read_ahead
    return generation


def _finish_reason(reason: str | None, num_calls: int) -> str | None:
    """Return OpenAI's reason for the end of an answer: "tool_calls" with calls, unless it was cut off."""
    return "tool_calls" if num_calls and reason == "stop" else reason


def _answer(service: Service, fields: ChatRequest, plan: ToolPlan, generation: Generation) -> Response:
    choices = [_choice(service, fields, plan, choice) for choice in generation.choices]
    return json_response(generation.answer("chatcmpl", "chat.completion", choices))


def _choice(service: Service, fields: ChatRequest, plan: ToolPlan, choice: Choice) -> dict[str, Any]:
    chunks = choice.chunks
    said = Said.by(piece for chunk in chunks for piece in chunk.parts)
    content = said.content or (None if said.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if said.thoughts:
        message |= _thoughts(said.thoughts)
    if said.calls:
        message["tool_calls"] = [_call(plan, fields.custom_tools, *call) for call in said.calls]
    logprobs = service.names.chat_logprobs(token for chunk in chunks for token in content_logprobs(chunk))
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs if fields.logprobs else None,
        "finish_reason": _finish_reason(choice.finish_reason, len(said.calls)),
        **({"tokens": service.names.provenance(chunks)} if fields.shows_tree else {}),
    }


def _thoughts(text: str) -> dict[str, str]:
    """Return thoughts under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def content_logprobs(chunk: StreamChunk) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens that are no thoughts."""
    if not chunk.thinks:
        return list(chunk.logprobs)
    return [token for token, thinks in zip(chunk.logprobs, chunk.thinks, strict=False) if not thinks]


def _call(plan: ToolPlan, custom: frozenset[str], name: str, arguments: str = "") -> dict[str, Any]:
    """Return a call, or its beginning, behind which its arguments follow.

    Args:
        custom: names of the custom tools, whose calls have a text as their input.
    """
    call_id = plan.new_call_id()
    if name not in custom:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    reader = InputText()
    return {
        "id": call_id,
        "type": "custom",
        "custom": {"name": name, "input": reader.push(arguments) + reader.finish()},
    }


class _Writer:
    """Makes the events of one choice from its text."""

    def __init__(self, service: Service, fields: ChatRequest, plan: ToolPlan, head: dict[str, Any]) -> None:
        self._service, self._fields, self._plan, self._head = service, fields, plan, head
        self._has_begun = False
        self._num_calls = 0
        self._custom = fields.custom_tools
        self._input: InputText | None = None  # of the last call, if it is one of a custom tool that is not over
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text is not known yet

    def events(self, choice: Choice, chunk: StreamChunk) -> bytes:
        begin = b"" if self._has_begun else self._event(choice, {"role": "assistant", "content": ""})
        self._has_begun = True
        self._logprobs += content_logprobs(chunk)
        is_end = chunk.finish_reason is not None
        deltas = [delta for piece in chunk.parts for delta in self._deltas(piece)]
        deltas += self._rest() if is_end else []
        if not deltas and not is_end and not self._fields.shows_tree:
            return begin
        parts: list[dict[str, Any]] = [{"delta": delta} for delta in deltas or [{}]]
        if self._fields.logprobs:
            parts[0]["logprobs"] = self._service.names.chat_logprobs(self._logprobs)
            self._logprobs = []
        if self._fields.shows_tree:
            parts[0]["tokens"] = self._service.names.provenance([chunk])
        parts[-1]["finish_reason"] = _finish_reason(chunk.finish_reason, self._num_calls)
        return begin + b"".join(self._event(choice, **part) for part in parts)

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        match piece:
            case CallArguments(call_idx, text):
                if self._input is not None:
                    return self._more_input(self._input.push(text))
                return [{"tool_calls": [{"index": call_idx, "function": {"arguments": text}}]}]
            case CallBegun(call_idx, name):
                rest = self._rest()
                self._num_calls += 1
                self._input = InputText() if name in self._custom else None
                return [*rest, {"tool_calls": [{"index": call_idx, **_call(self._plan, self._custom, name)}]}]
            case Thoughts(text):
                return [*self._rest(), _thoughts(text)]
            case Content(text):
                return [*self._rest(), {"content": text}]

    def _rest(self) -> list[dict[str, Any]]:
        """End the call of a custom tool, if the last one is open."""
        reader, self._input = self._input, None
        return [] if reader is None else self._more_input(reader.finish())

    def _more_input(self, text: str) -> list[dict[str, Any]]:
        return [{"tool_calls": [{"index": self._num_calls - 1, "custom": {"input": text}}]}] if text else []

    def _event(self, choice: Choice, delta: dict[str, Any], **fields: Any) -> bytes:
        content = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return event({**self._head, "choices": [content]})


async def _events(
    service: Service, fields: ChatRequest, plan: ToolPlan, generation: Generation, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    """Yield the answer as events; what arrives together is sent together."""
    writers = [_Writer(service, fields, plan, head) for _ in generation.choices]
    async with contextlib.aclosing(generation.events()) as pieces:
        async for choice, chunk in pieces:
            if sent := writers[choice.index].events(choice, chunk):
                yield sent
    if sent := generation.last_event(head):
        yield sent
