"""Grammars compiled for a model's tokens. The work is done by llguidance, an optional package.

A grammar is compiled in a child process first. The library is in Rust and recurses: some grammars of a few kilobytes
crash the process that compiles them, others take minutes or gigabytes, and only the end of the process stops them.
A grammar that passes there, in bounded time and memory, is compiled here.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from card.config import EngineSettings, Grammar
from card.errors import CapacityError, CardError, SettingsError, TargetError, named
from card.text.compilation import Charge, Compilation, Start, UnusableGrammarError
from card.text.compiler_pool import CompilerPool
from card.text.compiling import MOST_CHARS, compile_grammar
from card.text.grammar_sandbox import GivenUpError, Passed, Refused, SandboxHolder, TooSlowError
from card.text.grammar_tokens import GrammarTokens
from card.text.matcher import MatcherState, first_line
from card.text.tokenizer import Tokenizer
from card.tree.masks import GrammarState

logger = logging.getLogger(__name__)

_LIMIT_S = EngineSettings().grammar_timeout_s  # for callers without a limit of their own
_NUM_COMPILERS = 3  # threads, each with its child
MOST_KEPT = 32  # compiled grammars; the least recently used one is dropped
MOST_BYTES = 512 << 20  # of all that are kept or in use
_MOST_PASSED = 4096  # digests of grammars that need not be tried again
MOST_IN_LINE = 8  # grammars that a drafter waits for
_DRAFT_LIMIT_S = 10.0  # for each of them; without a grammar the drafter only drafts worse
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class GrammarCompiler:
    """Compiles grammars for the tokens of one model. Any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_ids: Sequence[int],
        *,
        num_threads: int = _NUM_COMPILERS,
        limit_s: float = _LIMIT_S,
    ) -> None:
        """Take the tokenizer; nothing is imported, built or started until a grammar comes.

        Args:
            vocab_size: of the model's embedding, which may have rows without a token.
            end_ids: tokens that end a text.
            num_threads: threads that compile, each with a child process of its own.
            limit_s: for a grammar whose callers give no limit.
        """
        self._tokens = GrammarTokens(tokenizer, vocab_size, end_ids)
        self._end_ids = frozenset(end_ids)
        self._limit_s = limit_s
        self._lock = threading.Lock()  # held for moments only: a grammar may take long
        self._compilers = CompilerPool(num_threads)
        self._begun: OrderedDict[Grammar, Compilation] = OrderedDict()  # least recently used first
        # Grammars in use or kept: a request keeps its grammar from `begin` to its end.
        self._alive: weakref.WeakValueDictionary[Grammar, Compilation] = weakref.WeakValueDictionary()
        self._charges: weakref.WeakSet[Charge] = weakref.WeakSet()
        self._passed: OrderedDict[bytes, Passed] = OrderedDict()  # by digest
        self._num_here = 0  # grammars that are being compiled in this process
        self._finalizer = weakref.finalize(self, self._compilers.close)

    @property
    def is_compiling(self) -> bool:
        """True if a grammar is being compiled in this process, which nothing can end."""
        return self._num_here > 0

    @property
    def num_waiting(self) -> int:
        """Grammars that are not begun."""
        return self._compilers.num_waiting

    def begin(
        self, grammar: Grammar, *, client: str = "", limit_s: float | None = None, retries: bool = True
    ) -> Compilation:
        """Compile a grammar in a thread; requests with the same grammar share the work. Raises: nothing.

        Callers fork the result. It fails with what `compile` raises. A caller that stops waiting calls `leave`.

        Args:
            client: clients take turns.
            limit_s: after which the caller stops waiting. The child gets half of it: the rest is for the same work in
                this process, which cannot be stopped.
            retries: compile it again if that failed before for a reason that may pass.
        """
        if (num_chars := len(grammar.source)) > MOST_CHARS:  # nor is it kept
            reason = f"it has {num_chars:,} characters, at most {MOST_CHARS:,} may be compiled; use a simpler one"
            refused = Compilation(grammar)
            refused.future.set_exception(UnusableGrammarError(_too_much(grammar, reason)))
            return refused
        with self._lock:
            work = self._begun.pop(grammar, None) or self._alive.get(grammar)
            if work is None or (retries and work.is_worth_a_retry):
                work = self._alive[grammar] = Compilation(grammar)
                work.job = functools.partial(self._carry_out, work)
                self._make_room()
            if work.job is not None and client not in work.clients:
                self._submit(work, client)
            self._begun[grammar] = work
            work.num_waiting += 1
            work.limit_s = max(work.limit_s, self._limit_s if limit_s is None else limit_s)
        return work

    def leave(self, work: Compilation) -> None:
        """Stop waiting; the last caller that stops ends the work, unless it has reached this process."""
        with self._lock:
            work.num_waiting -= 1
            if work.num_waiting > 0 or work.future.done() or (work.job is None and work.trial is None):
                return
            work.is_given_up = True
            if work.job is not None:
                for client in work.clients:
                    self._compilers.take_back(client, work.job)
                work.job = None
                work.future.cancel()
            elif work.trial is not None:
                work.trial.kill()
            if self._begun.get(work.grammar) is work:
                del self._begun[work.grammar]

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the beginning of a grammar; at once if it is known, even while others are being compiled.

        Raises: SettingsError if llguidance is missing, or cannot use the grammar, the tokenizer or its end tokens, if
            no text keeps to the grammar, or if it is more than can be compiled here in time; CapacityError if there is
            no room for it now.
        """
        work = self.begin(grammar)
        try:
            return work.future.result().fork()
        finally:
            self.leave(work)

    def find(self, grammar: Grammar) -> GrammarState | None:
        """Return the beginning of a grammar; None while it is compiled, or if it cannot be: a drafter does without."""
        is_new = grammar not in self._begun
        if len(grammar.source) > MOST_CHARS or (is_new and self.num_waiting >= MOST_IN_LINE):
            return None
        work = self.begin(grammar, limit_s=_DRAFT_LIMIT_S, retries=False)
        if is_new:
            work.future.add_done_callback(_tell_of_failure)
        has_failed = not work.future.done() or work.future.cancelled() or work.future.exception() is not None
        return None if has_failed else work.future.result().fork()

    def build(self, grammar: Grammar, num_bytes: int = 0) -> MatcherState:
        """Compile in this thread and this process. Raises: what `compile` raises.

        Args:
            num_bytes: that it takes.
        """
        tokens = self._tokens.own()
        charge = Charge(num_bytes)
        with self._lock:
            self._charges.add(charge)
        try:
            matcher = compile_grammar(tokens, grammar.kind, grammar.source)
        except ValueError as error:
            raise UnusableGrammarError(_refusal(grammar, str(error))) from error
        for said in dict.fromkeys(matcher.get_grammar_warnings()):
            logger.warning("a part of a schema is left to the model: %s", first_line(said))
        state = MatcherState(Start(matcher, charge), tokens.vocab_size, self._end_ids)
        if not _can_begin(state):
            raise UnusableGrammarError(
                _refusal(grammar, "no text can keep to it; does it need a part that needs itself?")
            )
        if not state.can_be_begun():
            forced = matcher.compute_ff_bytes().decode("utf-8", "replace")
            reason = "this model has no token to begin a text of it"
            raise UnusableGrammarError(
                _refusal(grammar, f"{reason}, which begins with {forced!r}" if forced else reason)
            )
        return state

    def close(self) -> None:
        """End the child processes, and what waits for them. May be called twice."""
        self._finalizer()
        with self._lock:
            for work in self._alive.values():
                if work.job is not None and not work.future.done():
                    work.future.set_exception(CapacityError("the model is being closed and takes no more grammars"))

    # ---- in a thread of the compilers --------------------------------------------------------------------------------

    def _submit(self, work: Compilation, client: str) -> None:
        """Put work into one more client's queue, so that no client waits for another one's turn."""
        assert work.job is not None
        try:
            self._compilers.submit(client, work.job)
            work.clients.add(client)
        except CapacityError as error:
            if not work.clients:
                work.job = None
                work.future.set_exception(error)

    def _carry_out(self, work: Compilation, holder: SandboxHolder) -> None:
        with self._lock:
            if work.job is None or work.future.done():  # it was begun in another client's turn, or given up
                return
            work.job, work.trial = None, holder
            work.future.set_running_or_notify_cancel()
        try:
            state = self._compiled(work, holder)
        except Exception as error:  # any error goes to the waiting requests
            work.future.set_exception(error.with_traceback(None))
        except BaseException:  # a panic of the library's is no Exception
            work.future.set_exception(UnusableGrammarError(_refusal(work.grammar, "panic:")))
        else:
            work.future.set_result(state)

    def _compiled(self, work: Compilation, holder: SandboxHolder) -> MatcherState:
        try:
            passed = self._tried(work, holder)
        finally:
            with self._lock:
                work.trial = None
        grammar = work.grammar if passed.lark is None else Grammar("lark", passed.lark)
        with self._lock:
            if work.is_given_up:
                raise GivenUpError("no request waits for the grammar any more")
            if not self._make_room(passed.num_bytes):
                raise CapacityError("the grammars in use take all the memory that they may; ask again soon")
            self._num_here += 1
        try:
            return self.build(grammar, passed.num_bytes)
        finally:
            with self._lock:
                self._num_here -= 1

    def _tried(self, work: Compilation, holder: SandboxHolder) -> Passed:
        """Return the child's answer to a grammar. Raises: SettingsError, CapacityError."""
        grammar = work.grammar
        digest = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (known := self._passed.get(digest)) is not None:
                return known
        self._tokens.check()
        sandbox = holder.prepare(self._tokens.setup)
        self._tokens.own()  # while the child does the same
        sandbox.wait()
        with self._lock:
            if work.is_given_up:  # before there was a child to be ended
                raise GivenUpError(_too_much(grammar, "no request waits for it any more"))
        try:
            passed = sandbox.try_out(grammar.kind, grammar.source, work.limit_s / 2)
        except Refused as error:
            raise UnusableGrammarError(_refusal(grammar, str(error))) from None
        except (TooSlowError, GivenUpError) as error:
            raise type(error)(_too_much(grammar, str(error))) from None
        except SettingsError as error:
            raise UnusableGrammarError(_too_much(grammar, str(error))) from None
        if passed.lark is None:  # a grammar in GBNF is rewritten there each time
            with self._lock:
                self._passed[digest] = passed
                if len(self._passed) > _MOST_PASSED:
                    self._passed.popitem(last=False)
        return passed

    def _make_room(self, num_bytes: int = 0) -> bool:
        """Drop the least recently used grammars; return whether there is room for so much. Called with the lock."""
        done = collections.deque(work.grammar for work in self._begun.values() if work.future.done())
        while done and (len(done) > MOST_KEPT or not self._has_room(num_bytes)):
            del self._begun[done.popleft()]
        return self._has_room(num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return sum(charge.num_bytes for charge in self._charges) + num_bytes <= MOST_BYTES


class BackgroundGrammars:
    """Grammars for a drafter that drafts without them until they are compiled; even the compiler is made on demand.

    Its calls are those of one thread.
    """

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        """Begin without a compiler; it is made, in a thread, when the first grammar comes."""
        self._make_compiler = make_compiler
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="card-grammar")
        self._compiler: Future[GrammarCompiler | None] | None = None

    def __call__(self, grammar: Grammar) -> GrammarState | None:
        """Return the beginning of a grammar; None while it is being compiled, and if it cannot be."""
        if self._compiler is None:
            self._compiler = self._executor.submit(self._make)
        compiler = self._compiler.result() if self._compiler.done() else None
        return None if compiler is None else compiler.find(grammar)

    def _make(self) -> GrammarCompiler | None:
        try:
            return self._make_compiler()
        except (CardError, OSError, RuntimeError, ValueError) as error:
            logger.warning("drafting goes on without grammars: %s", error)
            return None


def _tell_of_failure(work: Future[MatcherState]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.warning("drafting goes on without a grammar: %s", error)


def _can_begin(state: MatcherState) -> bool:
    try:
        return bool(state.allowed([()]).any())
    except TargetError:
        return False


def _too_much(grammar: Grammar, reason: str) -> str:
    return f"the {grammar.kind} grammar cannot be used: {reason}"


def _refusal(grammar: Grammar, reason: str) -> str:
    said = first_line(reason).replace(
        _ONE_OF, "it is not known whether the alternatives of oneOf exclude each other; use anyOf"
    )
    return (
        f"the {grammar.kind} of {named('grammar')} cannot be used: {said}; correct it or leave {named('grammar')} out"
    )
