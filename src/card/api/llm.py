"""The Python API, in vLLM's shape: `LLM`, `generate`, `chat`, `stream`."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from card.api.arguments import LLMArguments
from card.api.host import Host, PreparedRequest
from card.api.hosted import Hosted
from card.api.outputs import AnswerText, CompletionOutput, RequestOutput, StreamChunk
from card.api.prompts import Prompt, TokenIds, conversations, with_variables
from card.config import DraftSettings, EngineSettings, SamplingParams
from card.config.fields import require
from card.config.keywords import LLMSettings
from card.config.sampling import choices_of
from card.engine.engine import Engine
from card.engine.metrics import EngineStats
from card.engine.request import Update
from card.errors import ClosedError, SettingsError
from card.links.child import DrafterChild
from card.models.loaded_model import LoadedModel
from card.text.parts.pieces import schemas_of
from card.text.prompts import Messages
from card.text.tokenizer import Tokenizer
from card.tree.verify import MATCH, Verifier

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "StreamChunk"]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TellRead = Callable[[int, int], None]  # gets how many tokens of a prompt are read, and how many it has


@dataclass(slots=True)
class _UnreadRequest:
    """A request in the engine and its results that were not read yet."""

    prepared: PreparedRequest
    updates: deque[Update] = field(default_factory=deque)
    tell_read: TellRead | None = None


class LLM(Hosted):
    """A target model, perhaps with a draft model, and the method that decodes with them.

        with LLM("demo-target", "demo-draft") as llm:
            problem = "Paul works 4 hours a day and earns $12 per hour. How much does he earn in 3 days?"
            print(llm.chat([{"role": "user", "content": problem}])[0].outputs[0].text)

    Prompts of one call, and streams that are open at the same time, share one batch. The engine runs in the thread of
    the caller that waits for a result; calls from several threads are safe. Close it, or use it as a context manager:
    the drafter may be a separate process.
    """

    def __init__(
        self,
        target: str | PathLike[str] | LoadedModel = "demo-target",
        draft: str | PathLike[str] | LoadedModel | None = None,
        *,
        tokenizer: str | PathLike[str] | Tokenizer | PreTrainedTokenizerBase | None = None,
        method: str | None = None,
        verifier: Verifier = MATCH,
        spare: DrafterChild | None = None,
        say: Callable[[str], None] = lambda _: None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        """Load the models and start the drafter.

        Args:
            target: folder, GGUF file, hub name, "demo-target", or a loaded model (give its ``tokenizer`` then).
            draft: the same; None tries the block in the checkpoint, if any; a loaded model is in no other process.
            tokenizer: one of transformers, or the folder or name of one; None: the target's own.
            method: a name that `card methods` lists; None takes card if there is a draft model and suffix if not.
            verifier: decides which candidates to accept, see `card.tree.verify`; an inexact one needs allows_inexact.
            spare: a process for the drafter that was started before this process loaded torch.
            say: receives the current step in words, for a user who waits.
            settings: see `card.LLMSettings` for meanings and defaults.
        Raises: SettingsError, ModelError, VocabularyError, WorkerError.
        """
        given = {"settings": settings, "method": method, "verifier": verifier, "spare": spare, "say": say}
        self._host = Host(LLMArguments.of(target, draft, tokenizer=tokenizer, **given))
        self._engine: Engine = self._host.engine
        self._live: dict[int, _UnreadRequest] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._request_ids = itertools.count()

    @property
    def settings(self) -> EngineSettings:
        """The settings of the engine."""
        return self._host.settings

    @property
    def draft_settings(self) -> DraftSettings:
        """The draft settings of new requests; may be set, for comparisons under the fixed policy."""
        return self._host.draft_settings

    @draft_settings.setter
    def draft_settings(self, draft: DraftSettings) -> None:
        require(isinstance(draft, DraftSettings), "draft_settings", "card.DraftSettings", draft)
        self._host.draft_settings = draft

    def generate(
        self,
        prompts: str | Collection[str | TokenIds],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt (plain text, or token ids), all in one batch; return the results in their order.

        Args:
            sampling_params: for all prompts, or one for each.
        Raises: PromptError for a prompt that is empty or does not fit, and SettingsError if the numbers of parameters
            and prompts differ, before anything runs; WorkerError if this is closed. A request that fails later has
            finish_reason "error" in its result, and the others go on.
        """
        is_one = isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable)
        listed: list[Prompt] = [prompts] if is_one else list(prompts)  # type: ignore[list-item]
        return self._complete(listed, sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, put into the model's chat template, as `generate` does.

        Args:
            messages: of one conversation, or a list of conversations.
            sampling_params: for all conversations, or one for each.
            tools: functions that the model may call, in OpenAI's shape; the template tells them.
            chat_template_kwargs: other variables of the template, such as enable_thinking.
        Raises: PromptError, SettingsError as in `generate`.
        """
        listed = [with_variables(one, tools, chat_template_kwargs) for one in conversations(messages)]
        return self._complete(listed, sampling_params)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reads_parts: bool = False,
        tell_read: TellRead | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield the continuation of a prompt, or the answer to a conversation, as it is decoded.

        Args:
            tools, chat_template_kwargs: of a conversation, as in `chat`.
            reads_parts: whether the chunks of an answer have its `pieces`: thoughts, content, and calls of the tools.
            tell_read: gets how many tokens of the prompt are read, and how many it has, after each pass before an
                answer.

        Closing the iterator early drops the request. Raises: PromptError at once, not at the first chunk; the request's
        own error (TargetError, WorkerError) where it fails.
        """
        asked = with_variables(cast(Messages, prompt), tools, chat_template_kwargs)
        params = SamplingParams() if sampling_params is None else sampling_params
        functions = schemas_of(tools)
        if not reads_parts or not self._host.answers.has_parts(functions):
            return self._stream(self._prepare(asked, params), tell_read)
        prompt_ids = self._host.encode(asked)
        view = self._host.answers.view(prompt_ids, functions)
        return self._stream(self._host.make_request(prompt_ids, params, next(self._request_ids), view), tell_read)

    def stats(self) -> EngineStats:
        """Return gauges and totals of the engine. Raises: WorkerError if it was closed."""
        with self._held() as engine:
            return engine.stats()

    def reset_prefix_cache(self) -> None:
        """Drop the KV of finished requests that is kept for texts with the same beginning.

        Raises: WorkerError if the engine was closed.
        """
        with self._held() as engine:
            engine.forget_prefixes()

    def close(self) -> None:
        """End engine and drafter; open streams and other threads' calls raise WorkerError. May be called twice."""
        if self._host.home.is_here:  # a forked child has no lock that it could wait for
            with self._lock:
                self._is_closed = True
                self._live.clear()
                self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._host.home.check()
        if self._is_closed:
            raise ClosedError("the engine was shut down; make a new LLM")

    @contextmanager
    def _held(self) -> Iterator[Engine]:
        """Keep other threads from the engine. Raises: WorkerError if it was closed, or left behind by a fork."""
        self._check_open()
        with self._lock:
            self._check_open()  # it may have been closed meanwhile
            yield self._engine

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest:
        self._check_open()
        return self._host.make_request(prompt, params, next(self._request_ids))

    def _begin(self, prepared: PreparedRequest) -> _UnreadRequest:
        live = _UnreadRequest(prepared)
        with self._held() as engine:
            engine.add(prepared.checked)
            self._live[prepared.request.request_id] = live
        return live

    def _end(self, live: _UnreadRequest) -> None:
        """Forget a request, and drop it if it is not finished."""
        request_id = live.prepared.request.request_id
        if not self._host.home.is_here:
            return
        with self._lock:
            if self._live.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _next(self, live: _UnreadRequest) -> Update:
        """Return the next update of a request; run rounds until there is one. Raises: WorkerError."""
        while True:
            with self._held() as engine:
                if live.updates:
                    return live.updates.popleft()
                for update in engine.step():
                    if update.request_id in self._live:
                        self._live[update.request_id].updates.append(update)
                num_read, _ = engine.num_read(live.prepared.request.request_id)
            if live.tell_read is not None and not live.updates:
                live.tell_read(num_read, len(live.prepared.request.prompt_ids))

    def _updates(self, live: _UnreadRequest) -> Iterator[tuple[AnswerText, Update]]:
        """Yield each round's result for a request until it ends, with the text that became certain."""
        has_ended = False
        while not has_ended:
            update = self._next(live)
            has_ended = update.finish_reason is not None
            written = live.prepared.written(update)
            yield written.text, written.update
            if written.is_failure:
                self._end(live)
                return

    def _stream(self, prepared: PreparedRequest, tell_read: TellRead | None = None) -> Iterator[StreamChunk]:
        live = self._begin(prepared)
        live.tell_read = tell_read
        try:
            for text, update in self._updates(live):
                if update.error is not None:
                    raise update.error
                yield StreamChunk.of(text, [update])
        finally:
            self._end(live)

    def _complete(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        params = _shared_out(sampling_params, len(prompts))
        prepared = [
            (idx, self._prepare(prompt, choice))
            for idx, (prompt, one) in enumerate(zip(prompts, params, strict=True))
            for choice in choices_of(one)
        ]
        lives: list[_UnreadRequest] = []
        try:
            for _, one in prepared:
                lives.append(self._begin(one))
            answers: list[list[RequestOutput]] = [[] for _ in prompts]
            for (idx, _), live in zip(prepared, lives, strict=True):
                answers[idx].append(self._collect(live, prompts[idx], len(answers[idx])))
            return [RequestOutput.of_choices(choices) for choices in answers]
        finally:
            for live in lives:
                self._end(live)

    def _collect(self, live: _UnreadRequest, prompt: Prompt, choice_idx: int) -> RequestOutput:
        texts, updates = zip(*self._updates(live), strict=True)
        chunk = StreamChunk.of(AnswerText("".join(text.text for text in texts)), updates)
        request = live.prepared.request
        assert chunk.finish_reason is not None
        completion = CompletionOutput(
            choice_idx,
            chunk.text,
            chunk.token_ids,
            chunk.finish_reason,
            chunk.logprobs,
            chunk.origins,
            chunk.alternatives,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=request.prompt_ids,
            outputs=(completion,),
            method=self.method.name,
            exact=self.is_exact,
            target_cost=self.target_cost,
            stats=chunk.stats,
            error=updates[-1].error,
        )


def _shared_out(given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters of each prompt. Raises: SettingsError unless there is one for all, or one for each."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        return [SamplingParams() if given is None else given] * num_prompts
    params = list(given)
    if len(params) != num_prompts:
        raise SettingsError(
            f"got {len(params)} sampling parameters for {num_prompts} prompts; give one for all, or one for each"
        )
    return params
