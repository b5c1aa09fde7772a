"""Work beside the event loop, which answers everybody: tokenizing, and compiling grammars, which may take minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from card.config import Grammar
from card.server.errors import ApiError, bad_request

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 2  # of each kind of text
_NUM_COMPILERS = 4


class Aside:
    """Threads for what takes long; short texts have their own, so that they never wait for long ones."""

    def __init__(self, *, grammar_timeout_s: float) -> None:
        self._grammar_timeout_s = grammar_timeout_s
        self._short = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="card-short-text")
        self._long = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="card-long-text")
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="card-grammar")
        self._compiled: dict[Grammar, Future[Any]] = {}  # what is being compiled or waits for that

    @property
    def is_compiling(self) -> bool:
        """Whether a grammar is being compiled, which nothing can end."""
        return any(work.running() for work in self._compiled.values())

    async def run(self, is_long: bool, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return what ``function`` gives, run in a thread. Raises: whatever it raises."""
        pool = self._long if is_long else self._short
        return await asyncio.wrap_future(pool.submit(function, *args, **options))

    async def compile(
        self, grammar: Grammar, guide: str, function: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> None:
        """Wait until ``function`` has compiled a grammar; those who ask for the same one share the work.

        Args:
            guide: the field of the request that the grammar came from.
        Raises: ApiError 400 if it takes too long, 503 if it has not begun by then; whatever ``function`` raises.
        """
        work = self._compiled.get(grammar)
        if work is None:
            work = self._compiled[grammar] = self._compilers.submit(function, *args, **options)
            loop = asyncio.get_running_loop()
            work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._compiled.pop, grammar, None))
        done, _ = await asyncio.wait((asyncio.wrap_future(work),), timeout=self._grammar_timeout_s)
        if done:
            done.pop().result()
            return
        if not work.running():
            reason = "other grammars are being compiled; ask again soon"
            raise ApiError(503, reason, param=guide, code="grammar_queue", retry_after_s=5)
        raise bad_request(
            f"the grammar is not compiled within the {self._grammar_timeout_s:g} s that this server allows; "
            "use a simpler one",
            guide,
            "grammar_timeout",
        )

    def close(self) -> None:
        """Begin nothing more; what runs is not waited for."""
        for pool in (self._short, self._long, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)
