"""Service behind all endpoints: the model, the limits, the figures; and one API request's way through the engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase

from card import __version__
from card.api.async_llm import AsyncLLM, RequestStream
from card.api.outputs import StreamChunk
from card.api.prompts import Prompt
from card.config import Grammar, SamplingParams
from card.errors import CardError, SettingsError
from card.server.answers import event
from card.server.config import ServerSettings
from card.server.errors import ApiError, bad_request, shutting_down
from card.server.limits import Deadline, Gate
from card.server.metrics import Ledger, TextRecord, request_metrics
from card.server.params import derived_seed, model_defaults
from card.server.schemas import SamplingFields
from card.server.tokens import TokenNames
from card.server.tools.support import ToolSupport
from card.text.token_bytes import token_bytes
from card.workers.request import FinishReason

P = ParamSpec("P")
T = TypeVar("T")

_NUM_TOKENIZER_THREADS = 2  # for short texts, and as many for long ones
_STRICT_HINT = ", or set strict to false, which leaves to the model what a grammar cannot hold it to"
LONG_CHARS = 16_384  # of a text, or token ids: more of them hold up none that has less


@dataclass(slots=True)
class Choice:
    """One text of a request: where it comes from, and what came of it."""

    index: int
    prompt_ids: tuple[int, ...]
    stream: RequestStream | None  # None: nothing is written, the prompt alone is echoed
    record: TextRecord
    chunks: list[StreamChunk] = field(default_factory=list)  # if they are collected

    @property
    def text(self) -> str:
        """The collected text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the collected text ends."""
        return (self.chunks[-1].finish_reason if self.chunks else None) or "length"


class Generation:
    """All texts of one API request, from its admission until its answer was sent."""

    def __init__(self, service: Service, ticket: object, fields: SamplingFields, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self.deadline = Deadline(service.settings.request_timeout_s)
        self._service, self._ticket, self._fields = service, ticket, fields
        service.running.add(self)

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return what the answer, and every event of a stream, begins with."""
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
        """Return the numbers of tokens; a prompt counts once, however many texts were written to it."""
        prompts = self.choices[:: self._fields.n]
        num_prompt = sum(len(choice.prompt_ids) for choice in prompts)
        num_new = sum(choice.record.stats.num_new_tokens for choice in self.choices)
        cached = sum(choice.record.stats.reused_prompt_tokens for choice in prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, Any]:
        """Return the `metrics` of the answer, if it is to have them: {} or {"metrics": ...}."""
        if not self._fields.include_metrics and self._service.settings.spec_metrics == "none":
            return {}
        budget = self._service.llm.host.draft_settings.budget
        return {"metrics": request_metrics([one.record for one in self.choices if one.stream is not None], budget)}

    def answer(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer that is sent as a whole."""
        return {**self.head(prefix, kind), "choices": choices, "usage": self.usage(), **self.metrics()}

    def last_event(self, head: dict[str, Any]) -> bytes:
        """Return the event at the end of a stream that has usage and metrics; empty if neither is asked for."""
        tail = {"usage": self.usage()} if self._fields.includes_usage else {}
        tail |= self.metrics()
        return event({**head, "choices": [], **tail}) if tail else b""

    async def events(self) -> AsyncGenerator[tuple[Choice, StreamChunk], None]:
        """Yield what is written, of all choices in the order in which it comes. Raises: CardError."""
        written = [choice for choice in self.choices if choice.stream is not None]
        source = _read(written[0]) if len(written) == 1 else _merged(written)
        async with contextlib.aclosing(source):
            async for choice, chunk in source:
                yield choice, chunk

    async def collect(self) -> None:
        """Wait for all texts; they are in the choices' `chunks`. Raises: CardError."""
        async with self.deadline, contextlib.aclosing(self.events()) as events:
            async for choice, chunk in events:
                choice.chunks.append(chunk)

    async def close(self) -> None:
        """End what still runs, give the place back and book the figures. May be called twice."""
        if self not in self._service.running:
            return
        self._service.running.discard(self)
        for choice in self.choices:
            self._service.ledger.end(choice.record)
            if choice.stream is not None:
                await choice.stream.aclose()
        self._service.gate.leave(self._ticket)


class Service:
    """The model behind the endpoints."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm, self.settings = llm, settings
        engine = llm.host.settings
        self.gate = Gate(max_running=engine.max_num_seqs, max_waiting=settings.max_num_queued_reqs)
        self.ledger = Ledger()
        self.names = TokenNames(llm.host.tokenizer)
        self.tools = ToolSupport(llm.host.tokenizer, settings.tool_parser)
        config = llm.host.generation_config if settings.generation_config == "auto" else None
        self.defaults: dict[str, Any] = model_defaults(config)
        self.running: set[Generation] = set()
        self.started_at = int(time.time())
        self._token_bytes = token_bytes(self.tokenizer)
        names = {False: "card-short-text", True: "card-long-text"}
        self._threads = {is_long: ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, name) for is_long, name in names.items()}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self.llm.host.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the target."""
        return self.llm.host.runner.vocab_size

    def check_model(self, name: str) -> str:
        """Return the name that the answer carries. Raises: ApiError 404 for a model that is not served."""
        names = self.settings.served_model_names
        if name and name not in names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; there is {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name or names[0]

    async def encode(self, prompt: Prompt, *, must_fit: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt, made without holding others up.

        Args:
            must_fit: refuse a text that cannot fit into the context before it is tokenized.
        Raises: PromptError; ApiError 400 for one that cannot fit.
        """
        parts = [prompt] if isinstance(prompt, str) else prompt
        texts = [text for one in parts if not isinstance(one, int) for text in _texts_of(one)]
        has_images = any(isinstance(one, Mapping) and isinstance(one.get("content"), list) for one in parts)
        is_long = has_images or max(len(prompt), sum(map(len, texts))) >= LONG_CHARS
        return await self.run_in_thread(is_long, self._encode, prompt, texts if must_fit else [])

    def _encode(self, prompt: Prompt, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokenize a prompt. ``texts`` are those in it that may be too long: a chat template may leave some out."""
        least = sum(map(self._token_bytes.least_tokens, texts))
        if least > self.llm.max_model_len and not isinstance(prompt, str):
            least = self._token_bytes.least_tokens(self._rendered(prompt))
        if least > self.llm.max_model_len:
            raise bad_request(
                f"this model's context holds {self.llm.max_model_len} tokens, but the prompt has at least {least}; "
                "shorten it",
                "prompt",
                "context_length_exceeded",
            )
        return self.llm.host.encode(prompt)

    def _rendered(self, messages: Any) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (jinja2.TemplateError, ValueError):  # a template that refuses them, or none: tokenizing says it better
            return ""

    async def run_in_thread(self, is_long: bool, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return what ``function`` gives, run beside the event loop. Raises: whatever it raises.

        Short texts have threads of their own, so that they never wait for long ones.
        """
        return await asyncio.wrap_future(self._threads[is_long].submit(function, *args, **options))

    async def prepare(self, grammar: Grammar | None, guide: str) -> None:
        """Compile a request's grammar, which is kept, where others need not wait for it.

        Args:
            guide: the field of the request that the grammar came from.
        Raises: ApiError 400 if it cannot be used or takes too long, 503 if it has not begun by then.
        """
        if grammar is None:
            return
        work, limit_s = self.llm.host.grammars.begin(grammar), self.settings.grammar_timeout_s
        done, _ = await asyncio.wait((asyncio.wrap_future(work),), timeout=limit_s)
        if done:
            try:
                done.pop().result()
            except SettingsError as error:
                hint = _STRICT_HINT if guide in ("response_format", "tools") else ""
                raise bad_request(f"{error}{hint}", guide) from None
        elif not work.running():
            reason = "other grammars are being compiled; ask again soon"
            raise ApiError(503, reason, param=guide, code="grammar_queue", retry_after_s=5)
        else:
            reason = f"the grammar is not compiled within the {limit_s:g} s that this server allows; use a simpler one"
            raise bad_request(reason, guide, "grammar_timeout")

    def num_new_tokens(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """Return how many tokens a request may write, as many as there is room for if it does not say.

        Raises: ApiError 400 if it asks for more than the context or the server's limit allows.
        """
        room, limit = self.llm.max_model_len - num_prompt_tokens, self.settings.max_request_tokens
        if room < 1 or (wanted or 0) > room:
            raise bad_request(
                f"this model's context holds {self.llm.max_model_len} tokens, but the prompt has {num_prompt_tokens} "
                f"and {wanted or 1} more are wanted; shorten the prompt or lower max_tokens",
                "max_tokens" if room >= 1 else "prompt",
                "context_length_exceeded",
            )
        if wanted is not None and limit is not None and wanted > limit:
            raise bad_request(f"max_tokens may be at most {limit} on this server, got {wanted}", "max_tokens")
        if wanted is not None:
            return wanted
        return min(room, limit or room, int(self.defaults.get("max_tokens", room)))

    def start(
        self, fields: SamplingFields, jobs: Sequence[tuple[tuple[int, ...], SamplingParams | None]]
    ) -> Generation:
        """Queue a request's texts: `n` of each job, in this order; a job without parameters writes nothing.

        Raises: ApiError 429 or 503 if they are not taken; PromptError, SettingsError, WorkerError.
        """
        ticket = self.gate.enter(len(jobs) * fields.n)
        choices: list[Choice] = []
        try:
            for prompt_ids, params in jobs:
                for choice_idx in range(fields.n):
                    stream = None
                    if params is not None:
                        assert params.seed is not None
                        own = params.replace(seed=derived_seed(params.seed, choice_idx))
                        stream = self.llm.generate(prompt_ids, own)
                    record = self.ledger.begin(len(prompt_ids), speculates=fields.speculation == "on")
                    if stream is None:
                        record.finish_reason = "length"
                    choices.append(Choice(len(choices), prompt_ids, stream, record))
        except BaseException:
            for choice in choices:
                self.ledger.forget(choice.record)
            self.gate.leave(ticket)  # the streams end as they are let go of
            raise
        return Generation(self, ticket, fields, choices)

    def cut_off(self) -> None:
        """End all that runs: its time for shutting down is over."""
        for generation in list(self.running):
            generation.deadline.cut(shutting_down())

    def close(self) -> None:
        """Begin nothing more beside the event loop; what runs there is not waited for."""
        for pool in self._threads.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _texts_of(one: str | Mapping[str, Any]) -> list[str]:
    """Return the texts of a prompt or of one message."""
    content = one if isinstance(one, str) else one.get("content") or ""
    return [content] if isinstance(content, str) else [part.get("text", "") for part in content]


async def _read(choice: Choice) -> AsyncGenerator[tuple[Choice, StreamChunk], None]:
    assert choice.stream is not None
    try:
        async for chunk in choice.stream:
            choice.record.take(chunk)
            if chunk.finish_reason == "abort":
                raise shutting_down()
            yield choice, chunk
    except CardError:
        choice.record.finish_reason = "error"
        raise


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, StreamChunk], None]:
    arrived: asyncio.Queue[tuple[Choice, StreamChunk] | CardError | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async for item in _read(choice):
                arrived.put_nowait(item)
            arrived.put_nowait(None)
        except CardError as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        num_left = len(tasks)
        while num_left:
            item = await arrived.get()
            if item is None:
                num_left -= 1
            elif isinstance(item, CardError):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
