"""Shared state of all endpoints: the model, the limits, the figures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from card.api.async_llm import AsyncLLM
from card.config import Grammar
from card.errors import PromptError, SettingsError, named
from card.server.admission import given_key
from card.server.arrivals import Arrival, Arrivals
from card.server.config import ServerSettings
from card.server.errors import ApiError, bad_request, too_long
from card.server.limits import Gate
from card.server.logs import log_event
from card.server.metrics import Ledger
from card.server.reading import ReadingAhead
from card.server.tokens import TokenNames
from card.server.tools.support import ToolSupport
from card.server.waiting import end_of, unless_gone
from card.text.chat_template import render_chat
from card.text.grammar_sandbox import TooSlowError
from card.text.grammar_tokens import NoGrammarsError
from card.text.infill import find_infill
from card.text.prompts import Messages
from card.text.token_bytes import token_bytes
from card.text.tokenizer import Tokenizer
from card.text.tokens import CHARS_PER_TOKEN

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
SentPrompt = str | Sequence[int] | Messages

USUAL_TAG = ":latest"  # which clients of Ollama add to a name without a tag
_MOST_IGNORED = 256  # names of fields that are logged
_CUT_SHARE = 1.25  # of the context: near the cut, tokens may differ from those of the whole text
_NUM_TOKENIZER_THREADS = 2  # for short texts, and as many for long ones
_NUM_BODY_THREADS = 2  # they hold Python's lock, so more would not be faster
_MOST_BODIES = 64  # of the largest size, whose memory is what may wait for clients
_STRICT_HINT = ", or set strict to false, which leaves to the model what a grammar cannot enforce"
_LEAST_MOST_IDS = 100_000
LONG_CHARS = 16_384  # of a text, or token ids; longer inputs have their own threads


class Service:
    """The model behind the endpoints."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm, self.settings = llm, settings
        engine = llm.host.settings
        self.gate = Gate(max_running=engine.max_num_seqs, max_waiting=settings.max_num_queued_reqs)
        self.ledger = Ledger()
        self.names = TokenNames(llm.host.tokenizer)
        self.tools = ToolSupport(llm.host.answers)
        self.infill = find_infill(llm.host.tokenizer)
        limits_s = settings.first_token_timeout_s, settings.request_timeout_s
        self.arrivals = Arrivals(*limits_s, _MOST_BODIES * settings.max_request_bytes)
        self.ahead = ReadingAhead(self)
        self.started_at = int(time.time())
        self._token_bytes = token_bytes(self.tokenizer)
        self._ignored = set[str]()  # fields that were logged
        names = {False: "card-short-text", True: "card-long-text"}
        self._threads = {is_long: ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, name) for is_long, name in names.items()}

        self.body_threads = ThreadPoolExecutor(_NUM_BODY_THREADS, "card-body")

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.llm.host.tokenizer

    def is_quiet(self) -> bool:
        """Return whether nobody is being answered, and the server goes on."""
        return not self.gate.num_requests and self.arrivals.is_open

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the target."""
        return self.llm.host.runner.vocab_size

    @property
    def most_ids(self) -> int:
        """Most tokens that are counted, or turned into text, in one request: several times the context."""
        return max(_LEAST_MOST_IDS, 4 * self.llm.max_model_len)

    def note_ignored(self, names: Sequence[str]) -> str:
        """Return fields that nothing reads as the value of a header, and log each of them once."""
        for name in names:
            if name not in self._ignored and len(self._ignored) < _MOST_IGNORED:
                self._ignored.add(name)
                log_event(logger, logging.WARNING, "ignored", field=name)
        return ", ".join(name.encode("ascii", "replace").decode() for name in names)

    def is_known(self, name: str) -> bool:
        """Return whether this is a name of the model, or none."""
        names = (*self.settings.served_model_names, self.llm.host.settings.target)
        return not name or name in names or name.removesuffix(USUAL_TAG) in names

    def check_model(self, name: str, *, must_be_known: bool = False) -> str:
        """Return the model name for the answer: there is one model, whatever clients call it.

        Raises: ApiError 404 for a model that is not served, if the server is strict or the name has to be one of its.
        """
        names = self.settings.served_model_names
        if not self.is_known(name):
            if not (self.settings.strict_fields or must_be_known):
                return names[0]
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; there is {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name or names[0]

    async def encode(self, prompt: SentPrompt, *, must_fit: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt, made beside the event loop.

        Args:
            must_fit: refuse a text that cannot fit into the context before it is tokenized.
        Raises: PromptError; ApiError 400 for a prompt that cannot fit.
        """
        if must_fit and not isinstance(prompt, str) and len(prompt) > self.llm.max_model_len:
            self.num_new_tokens(len(prompt), 1)  # raises the right error: each takes at least one token
        is_ids = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], int)
        parts: Sequence[Any] = [prompt] if isinstance(prompt, str) else () if is_ids else prompt
        texts = [text for one in parts for text in _texts_of(one)]
        has_images = any(isinstance(one, Mapping) and isinstance(one.get("content"), list) for one in parts)
        is_long = has_images or max(len(prompt), sum(map(len, texts))) >= LONG_CHARS
        return await self.run_in_thread(is_long, self._encode, prompt, texts if must_fit else [])

    def check_countable(self, text: str) -> None:
        """Raise ApiError 400 for a text with more tokens than are counted in one request."""
        if (least := self._token_bytes.least_tokens(text)) > self.most_ids:
            raise bad_request(f"prompt: at most {self.most_ids} tokens are counted, got at least {least}", "prompt")

    def _encode(self, prompt: SentPrompt, texts: Sequence[str]) -> tuple[int, ...]:
        """Tokenize a prompt. ``texts`` are its texts that may be too long; a chat template may omit some."""
        most = self.llm.max_model_len
        is_long = sum(map(len, texts)) > CHARS_PER_TOKEN * most
        if is_long or sum(map(self._token_bytes.least_tokens, texts)) > most:
            self.check_fits(prompt if isinstance(prompt, str) else self._rendered(prompt))
        return self.llm.host.encode(prompt)

    def check_fits(self, text: str) -> None:
        """Raise ApiError 400 for a text that surely cannot fit into the context; not for every one."""
        most = self.llm.max_model_len
        least = self._token_bytes.least_tokens(text)
        if least <= most:
            least = self._tokens_of_beginning(text)
        if least > most:
            raise too_long(most, least)

    def _tokens_of_beginning(self, text: str) -> int:
        """Return the number of tokens at a text's beginning if the whole cannot fit; else 0.

        Tokenizing takes a hundred times the memory of a text, so a text that is far too long is not tokenized whole.
        """
        most = self.llm.max_model_len
        beginning = text[: CHARS_PER_TOKEN * most]
        if len(beginning) == len(text):
            return 0
        num_tokens = len(self.tokenizer.encode(beginning, add_special_tokens=False))
        return num_tokens if num_tokens > _CUT_SHARE * most else 0

    def _rendered(self, messages: Any) -> str:
        try:
            return render_chat(self.tokenizer, messages, add_generation_prompt=True)
        except PromptError:  # no template, or one that refuses them: tokenizing reports it better
            return ""

    async def run_in_thread(self, is_long: bool, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run ``function`` beside the event loop and return its result. Raises: any error of ``function``.

        Short texts have their own threads, so that they never wait for long ones.
        """
        return await asyncio.wrap_future(self._threads[is_long].submit(function, *args, **options))

    async def prepare(self, request: Request, grammar: Grammar | None, guide: str) -> None:
        """Compile a request's grammar beside the event loop; it is kept until the request is answered.

        Args:
            guide: the field of the request that the grammar came from.
        Raises: ApiError 400 if it cannot be used or takes too long, 501 if this server can follow none, 503 if it has
            not begun by then, 499 if the client disconnects; CapacityError if there is no room for it.
        """
        if grammar is None:
            return
        grammars, limit_s = self.llm.host.grammars, self.llm.host.settings.grammar_timeout_s
        arrival: Arrival = request.state.arrival
        work = grammars.begin(grammar, client=arrival.client, limit_s=limit_s)
        spelling = request.state.spelling
        request.state.spelling = {**spelling, "grammar": spelling.get(guide, guide)}  # what follows names this field
        request.state.grammars = (*getattr(request.state, "grammars", ()), work)
        try:
            if not work.future.done():
                await unless_gone(request, end_of(work.future, limit_s))
            if work.future.done():
                work.future.result()
            elif not work.future.running():
                reason = "other grammars are being compiled; ask again soon"
                raise ApiError(503, reason, param=named("grammar"), code="grammar_queue", retry_after_s=5)
            else:
                raise TooSlowError(
                    f"the grammar was not compiled within the {limit_s:g} s that this server allows; use a simpler one"
                )
        except NoGrammarsError:  # whose text names folders of this machine
            lack = "this server lacks the package llguidance, which holds answers to a form; leave it out"
            raise ApiError(501, f"{named('grammar')}: {lack}", param=named("grammar"), code="no_grammars") from None
        except SettingsError as error:
            code = "grammar_timeout" if isinstance(error, TooSlowError) else None
            hint = _STRICT_HINT if code is None and guide in ("response_format", "tools") else ""
            raise bad_request(f"{error.args[0]}{hint}", named("grammar"), code) from None
        finally:
            grammars.leave(work)

    def client_of(self, scope: Scope) -> str:
        """Return whose a request is: the key if keys are required, else the address."""
        if self.settings.api_keys:
            return given_key(dict(scope["headers"])).decode("latin-1")
        return scope["client"][0] if scope.get("client") else ""

    def num_new_tokens(self, num_prompt_tokens: int, wanted: int | None, *, is_asked: bool = True) -> int | None:
        """Return how many tokens a request may write; None: as many as fit.

        Args:
            is_asked: False if the request did not say what it wants, and this is the usual number.
        Raises: ApiError 400 if the prompt leaves no room, or it asks for more than the server's limit allows.
        """
        room, limit = self.llm.max_model_len - num_prompt_tokens, self.settings.max_request_tokens
        if room < 1:
            raise too_long(self.llm.max_model_len, num_prompt_tokens, wanted or 1)
        most = room if is_asked or limit is None else min(room, limit)
        wanted = None if wanted is None else min(wanted, most)
        if wanted is not None and limit is not None and wanted > limit:
            raise bad_request(
                f"{named('max_tokens')} may be at most {limit} on this server, got {wanted}", named("max_tokens")
            )
        if wanted is not None or limit is None:
            return wanted
        return min(room, limit, int(self.llm.host.sampling_defaults.get("max_tokens", room)))

    def close(self) -> None:
        """Start no more work beside the event loop, without waiting for running work."""
        self.ahead.stop()
        for pool in (*self._threads.values(), self.body_threads):
            pool.shutdown(wait=False, cancel_futures=True)


def _texts_of(one: str | Mapping[str, Any]) -> list[str]:
    """Return the texts of a prompt or a message."""
    if isinstance(one, str):
        return [one]
    content, reasoning = one.get("content") or "", one.get("reasoning_content", "")
    return [reasoning, *([content] if isinstance(content, str) else [part.get("text", "") for part in content])]
