"""`AsyncLLM`: the Python API for asyncio. The engine runs in its own thread, and many requests share its batch."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from card.api.arguments import LLMArguments
from card.api.driver import JOIN_TIMEOUT_S, Driver
from card.api.host import Host
from card.api.hosted import Hosted
from card.api.mailbox import Mailbox
from card.api.outputs import StreamChunk
from card.api.prompts import Prompt, with_variables
from card.config import SamplingParams
from card.config.fields import plain, require
from card.config.keywords import LLMSettings
from card.config.sampling import MAX_LOGPROBS
from card.engine.metrics import EngineStats
from card.engine.scoring import Scores, ScoringJob
from card.errors import CardError, SettingsError, WorkerError
from card.links.child import DrafterChild
from card.links.leases import Leases
from card.models.loaded_model import LoadedModel
from card.text.parts.view import AnswerView
from card.text.prompts import Messages
from card.text.tokenizer import Tokenizer
from card.tree.verify import MATCH, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AsyncLLM(Hosted):
    """A target model, perhaps with a draft model, that answers many requests at once in asyncio programs.

        async with AsyncLLM("demo-target", "demo-draft") as llm:
            problem = "Paul works 4 hours a day and earns $12 per hour. How much does he earn in 3 days?"
            async for chunk in llm.generate([{"role": "user", "content": problem}]):
                print(chunk.text, end="")

    Methods may be called from any event loop, or several; a stream must be read in the loop that it was made in. If the
    engine breaks, every open stream and every later call raises WorkerError.
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
        leases: Leases | None = None,
        say: Callable[[str], None] = lambda _: None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        """Load the models and start drafter and engine; this takes a while and blocks. Arguments are those of `LLM`.

        Raises: SettingsError, ModelError, VocabularyError, WorkerError.
        """
        given = {"settings": settings, "method": method, "verifier": verifier, "spare": spare, "say": say}
        self._host = Host(LLMArguments.of(target, draft, tokenizer=tokenizer, leases=leases, **given))
        self._driver = Driver(self._host)
        self._finalizer = weakref.finalize(self, self._driver.close)
        self._request_ids = itertools.count()

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last made progress or was idle; grows while it hangs."""
        return time.monotonic() - self._driver.last_progress

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        view: AnswerView | None = None,
        prediction: Sequence[int] = (),
    ) -> RequestStream:
        """Queue a request at once and return its stream.

        Args:
            prompt: text, token ids, or a conversation for the model's chat template.
            request_id: a name for `abort`, not in use by another running request; None makes one up.
            tools, chat_template_kwargs: of a conversation, as in `LLM.chat`.
            view: how the answer is read in parts; None: as one text.
            prediction: tokens that the answer may repeat, in this order or in parts; the writer suffix copies them.
        Raises: PromptError for a prompt that is empty or does not fit; SettingsError for a request_id in use, or
            outside a running event loop; WorkerError if the engine is down.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise SettingsError(
                "generate needs a running event loop; use it in a coroutine, or use card.LLM"
            ) from error
        require(request_id is None or isinstance(request_id, str), "request_id", "a string or None", request_id)
        number, params = next(self._request_ids), SamplingParams() if sampling_params is None else sampling_params
        asked = with_variables(cast(Messages, prompt), tools, chat_template_kwargs)
        prepared = self._host.make_request(asked, params, number, view, prediction)
        mailbox = Mailbox(loop)
        name = f"card-{number}" if request_id is None else request_id
        self._driver.add(name, prepared, mailbox)
        return RequestStream(self, name, number, mailbox)

    async def abort(self, request_id: str) -> bool:
        """Drop a request and return once its place and its KV are free; False if no such request is running.

        Its stream ends with a chunk whose finish_reason is "abort". Raises: WorkerError if the engine is down.
        """
        done = self._driver.abort(request_id)
        return await asyncio.wrap_future(done) if done else False

    async def score(self, prompt: Prompt, num_top: int = 0) -> Scores:
        """Return how likely the target finds each token of a text but the first, and the ``num_top`` likeliest there.

        Raises: PromptError for a prompt that is empty or does not fit; SettingsError for a ``num_top`` above 20;
            TargetError if the model fails; WorkerError if the engine is down.
        """
        num_top = plain(num_top)
        is_count = isinstance(num_top, int) and not isinstance(num_top, bool) and 0 <= num_top <= MAX_LOGPROBS
        require(is_count, "num_top", f"a number of tokens from 0 to {MAX_LOGPROBS}", num_top)
        token_ids = self._host.encode(prompt)
        self._host.scorer.check(token_ids)
        job = ScoringJob(token_ids, num_top)
        self._driver.score(job)
        return await asyncio.wrap_future(job.done)

    def stats(self) -> EngineStats:
        """Return gauges and totals of the engine as of its last round. Raises: WorkerError if it is down."""
        return self._driver.stats()

    async def ended(self) -> WorkerError:
        """Wait until the engine is down, and return the reason; `__cause__` is the error unless it was shut down."""
        return await asyncio.wrap_future(self._driver.ended)

    async def shutdown(self) -> None:
        """End engine and drafter; open streams raise WorkerError. May be called twice.

        Raises: WorkerError if the engine does not end in time.
        """
        if not await asyncio.to_thread(self._driver.close):
            raise WorkerError(f"the engine's thread did not end within {JOIN_TIMEOUT_S:.0f} s; it still runs")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


class RequestStream(AsyncIterator[StreamChunk]):
    """The answer to one request as it is decoded; a caller that stops reading it drops the request.

    A chunk holds everything new since the last chunk read, so a slow reader gets fewer and larger chunks. The last one
    carries the finish_reason. The request ends within a round when the loop is left, the reading task is cancelled,
    `aclose` is called or the stream is deleted. Reading raises TargetError if the model failed for this request, and
    WorkerError if the engine broke or was shut down.
    """

    def __init__(self, llm: AsyncLLM, request_id: str, number: int, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self._llm = llm  # must live while the stream is read
        self._number = number
        self._mailbox = mailbox
        self._is_over, self._num_read = False, (0, 0)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamChunk:
        if self._is_over:
            raise StopAsyncIteration
        self._llm.host.home.check()
        try:
            chunk = await self._mailbox.take()
        except SettingsError:  # the caller's mistake: the request goes on
            raise
        except (CardError, asyncio.CancelledError):
            self._drop()
            raise
        self._is_over = chunk.finish_reason is not None
        return chunk

    @property
    def num_read(self) -> tuple[int, int]:
        """Tokens of the text that are read by now, or were at its end, and how many of these for an earlier text."""
        self._num_read = max(self._num_read, self._llm.host.engine.num_read(self._number))
        return self._num_read

    def tell_unread(self, tell: Callable[[int], None]) -> None:
        """Have about how many bytes more, or fewer, are unread told from now on, in the event loop of the stream."""
        self._mailbox.tell = tell

    async def aclose(self) -> None:
        """End the request, if it is still running, and drop what is unread."""
        self._drop()
        self._mailbox.clear()

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._llm._driver.forget(self._number)
