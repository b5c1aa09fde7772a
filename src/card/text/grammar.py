"""Grammars compiled for a model's tokens. The work is done by llguidance, an optional package.

A grammar is compiled in a child process first. The library is in Rust and recurses: some grammars of a few kilobytes
end the process that compiles them, others take minutes or gigabytes, and nothing but the end of the process stops them.
What has passed there, in bounded time and memory, is compiled here.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from card.config import Grammar
from card.errors import CapacityError, CardError, SettingsError, TargetError
from card.text.canary import Bench, CanarySetup, GivenUpError, Passed, Refused, TooSlowError
from card.text.compiling import MOST_CHARS, compile_grammar, wrap_tokens
from card.text.matcher import MatcherState, first_line
from card.tree.masks import GrammarState
from card.text.workshop import Job, Workshop

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 60.0  # where nobody says how long to wait
_NUM_COMPILERS = 3  # threads, each with its child
MOST_KEPT = 32  # compiled grammars; the one not used for longest makes place
MOST_BYTES = 512 << 20  # of all that are kept or in use
_MOST_PASSED = 4096  # digests of grammars that need not be tried again
MOST_IN_LINE = 8  # grammars that a drafter waits for
_DRAFT_LIMIT_S = 10.0  # for each of them; without it the drafter only drafts worse
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class Compilation:
    """A grammar that is being compiled, or was; those who ask for the same one share it."""

    def __init__(self, grammar: Grammar, client: str) -> None:
        """Begin with a grammar that nobody works on."""
        self.grammar, self.client = grammar, client
        self.future: Future[MatcherState] = Future()
        self.num_waiting = 0  # those who would miss it
        self.limit_s = 0.0  # the longest that one of them waits
        self.job: Job | None = None  # until it is begun
        self.trial: Bench | None = None  # where it is tried, while it is
        self.is_given_up = False

    @property
    def is_worth_a_retry(self) -> bool:
        """True if it was given up, or failed for a reason that may pass."""
        if not self.future.done() or self.future.cancelled():
            return self.is_given_up
        error = self.future.exception()
        return error is not None and not isinstance(error, GrammarError)


class _Charge:
    """The memory of a compiled grammar, for as long as anything is left of it."""

    __slots__ = ("__weakref__", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class _Start:
    """A matcher at the beginning of its grammar, from which all others are copied."""

    __slots__ = ("_charge", "_matcher")

    def __init__(self, matcher: Any, charge: _Charge) -> None:
        self._matcher, self._charge = matcher, charge

    def deep_copy(self) -> Any:
        return self._matcher.deep_copy()


class GrammarError(SettingsError):
    """A grammar that can never be used."""


class GrammarCompiler:
    """Compiles grammars for the tokens of one model. Any thread may call it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        end_ids: Sequence[int],
        *,
        num_threads: int = _NUM_COMPILERS,
    ) -> None:
        """Take the tokenizer; nothing is imported, built or started until a grammar comes.

        Args:
            vocab_size: of the model, whose embedding may have rows without a token.
            end_ids: tokens that end a text.
            num_threads: that compile, each with a child process of its own.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(sorted(end_ids))
        self._lock = threading.Lock()  # held for moments only: a grammar may take long
        self._tokens_lock = threading.Lock()
        self._tokens: Any = None  # llguidance's own tokenizer; it takes about a second to build
        self._setup: CanarySetup | None = None
        self._workshop = Workshop(num_threads)
        self._begun: OrderedDict[Grammar, Compilation] = OrderedDict()  # least recently used first
        # Those that somebody uses or keeps: a request keeps its grammar from `begin` to its end.
        self._alive: weakref.WeakValueDictionary[Grammar, Compilation] = weakref.WeakValueDictionary()
        self._charges: weakref.WeakSet[_Charge] = weakref.WeakSet()
        self._passed: OrderedDict[bytes, Passed] = OrderedDict()  # by digest
        self._num_here = 0  # grammars that are being compiled in this process
        self._finalizer = weakref.finalize(self, self._workshop.close)

    @property
    def is_compiling(self) -> bool:
        """True if a grammar is being compiled in this process, which nothing can end."""
        return self._num_here > 0

    @property
    def num_waiting(self) -> int:
        """Grammars that are not begun."""
        return self._workshop.num_waiting

    def begin(
        self, grammar: Grammar, *, client: str = "", limit_s: float = TIME_LIMIT_S, retries: bool = True
    ) -> Compilation:
        """Have a grammar compiled in a thread; those who ask for the same one share the work. Raises: nothing.

        The result is to be forked. It fails with what `compile` raises. Who stops waiting says so with `leave`.

        Args:
            client: clients take turns.
            limit_s: after which the caller stops waiting. Half of it is for the child: the rest is for the same work
                in this process, which cannot be stopped.
            retries: compile it again if that failed before for a reason that may pass.
        """
        with self._lock:
            work = self._begun.pop(grammar, None) or self._alive.get(grammar)
            if work is None or (retries and work.is_worth_a_retry):
                work = self._alive[grammar] = Compilation(grammar, client)
                self._submit(work)
                self._make_room()
            self._begun[grammar] = work
            work.num_waiting += 1
            work.limit_s = max(work.limit_s, limit_s)
        return work

    def leave(self, work: Compilation) -> None:
        """Stop waiting: work that nobody waits for any more is ended, unless it has come as far as this process."""
        with self._lock:
            work.num_waiting -= 1
            if work.num_waiting or work.future.done() or (work.job is None and work.trial is None):
                return
            work.is_given_up = True
            if work.job is not None and self._workshop.take_back(work.client, work.job):
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
        if is_new and self.num_waiting >= MOST_IN_LINE:
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
        tokens = self._own_tokens()
        charge = _Charge(num_bytes)
        self._charges.add(charge)
        try:
            matcher = compile_grammar(tokens, grammar.kind, grammar.source)
        except ValueError as error:
            raise GrammarError(_refusal(grammar, str(error))) from error
        state = MatcherState(_Start(matcher, charge), tokens.vocab_size, frozenset(self._end_ids))
        if not _can_begin(state):
            raise GrammarError(_refusal(grammar, "no text can keep to it; does it need a part that needs itself?"))
        if not state.can_be_begun():
            forced = matcher.compute_ff_bytes().decode("utf-8", "replace")
            reason = "this model has no token to begin a text of it"
            raise GrammarError(_refusal(grammar, f"{reason}, which begins with {forced!r}" if forced else reason))
        return state

    def close(self) -> None:
        """End the child processes, and what waits for them. May be called twice."""
        self._finalizer()
        with self._lock:
            for work in self._alive.values():
                if work.job is not None and not work.future.done():
                    work.future.set_exception(_closed())

    # ---- in a thread of the workshop --------------------------------------------------------------------------------

    def _submit(self, work: Compilation) -> None:
        num_chars = len(work.grammar.source)
        if num_chars > MOST_CHARS:
            reason = f"it has {num_chars:,} characters, at most {MOST_CHARS:,} may be compiled"
            work.future.set_exception(GrammarError(_too_much(work.grammar, f"{reason}; use a simpler one")))
            return
        work.job = functools.partial(self._carry_out, work)
        if not self._workshop.submit(work.client, work.job):
            work.future.set_exception(_closed())

    def _carry_out(self, work: Compilation, bench: Bench) -> None:
        with self._lock:
            work.job, work.trial = None, bench
            if work.future.done() or not work.future.set_running_or_notify_cancel():
                return
        try:
            state = self._compiled(work, bench)
        except Exception as error:  # whatever it is, it is for those who wait
            work.future.set_exception(error.with_traceback(None))
        except BaseException:  # a panic of the library's is no Exception
            work.future.set_exception(GrammarError(_refusal(work.grammar, "panic:")))
        else:
            work.future.set_result(state)

    def _compiled(self, work: Compilation, bench: Bench) -> MatcherState:
        try:
            passed = self._tried(work, bench)
        finally:
            with self._lock:
                work.trial = None
        grammar = work.grammar if passed.lark is None else Grammar("lark", passed.lark)
        with self._lock:
            if work.is_given_up:
                raise GivenUpError("nobody waits for the grammar any more")
            if not self._make_room(passed.num_bytes):
                raise CapacityError("the grammars in use take all the memory that they may; ask again soon")
            self._num_here += 1
        try:
            return self.build(grammar, passed.num_bytes)
        finally:
            with self._lock:
                self._num_here -= 1

    def _tried(self, work: Compilation, bench: Bench) -> Passed:
        """Return what the child says of a grammar. Raises: SettingsError, CapacityError."""
        grammar = work.grammar
        digest = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if (known := self._passed.get(digest)) is not None:
                return known
        self._check()
        canary = bench.prepare(self._canary_setup)
        self._own_tokens()  # while the child does the same
        canary.wait()
        with self._lock:
            if work.is_given_up:  # before there was a child to be ended
                raise GivenUpError(_too_much(grammar, "nobody waits for it any more"))
        try:
            passed = canary.try_out(grammar.kind, grammar.source, work.limit_s / 2)
        except Refused as error:
            raise GrammarError(_refusal(grammar, str(error))) from None
        except (TooSlowError, GivenUpError) as error:
            raise type(error)(_too_much(grammar, str(error))) from None
        except SettingsError as error:
            raise GrammarError(_too_much(grammar, str(error))) from None
        if passed.lark is None:  # a grammar in GBNF is rewritten there each time
            with self._lock:
                self._passed[digest] = passed
                if len(self._passed) > _MOST_PASSED:
                    self._passed.popitem(last=False)
        return passed

    def _make_room(self, num_bytes: int = 0) -> bool:
        """Let go of what was not used for longest; return whether there is room for so much. Called with the lock."""
        done = collections.deque(work.grammar for work in self._begun.values() if work.future.done())
        while done and (len(done) > MOST_KEPT or not self._has_room(num_bytes)):
            del self._begun[done.popleft()]
        return self._has_room(num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return sum(charge.num_bytes for charge in self._charges) + num_bytes <= MOST_BYTES

    def _check(self) -> None:
        """Raise SettingsError if there can be no grammars for this model, or on this machine."""
        if not self._end_ids:
            raise SettingsError("a grammar needs a model with an end token, and this one has none; leave grammar out")
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise SettingsError(
                "a grammar needs the package llguidance, which is not installed; run pip install "
                "'card-decoding[grammar]'"
            ) from error

    def _canary_setup(self) -> CanarySetup:
        """Return what a child must know. Raises: SettingsError for a tokenizer that the library cannot know."""
        with self._tokens_lock:
            if self._setup is None:
                num_ids = max(self._vocab_size, len(self._tokenizer))
                with self._says_that_it_cannot_be_used():
                    core = _core_of(self._tokenizer).encode()
                self._setup = CanarySetup(core=core, num_ids=num_ids, end_ids=self._end_ids)
            return self._setup

    def _own_tokens(self) -> Any:
        """Return llguidance's tokenizer of this process. Raises: SettingsError if it does not know this one."""
        setup = self._canary_setup()
        with self._tokens_lock, self._says_that_it_cannot_be_used():
            if self._tokens is None:
                self._tokens = wrap_tokens(setup.core.decode(), setup.num_ids, setup.end_ids)
            return self._tokens

    @contextlib.contextmanager
    def _says_that_it_cannot_be_used(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the library says to a tokenizer that it does not know
            raise SettingsError(
                f"llguidance cannot use the tokenizer {type(self._tokenizer).__name__}: {error}; leave grammar out, or "
                "use a model with a fast tokenizer"
            ) from error


class BackgroundGrammars:
    """The grammars of a drafter that goes on until they are compiled; not even a compiler is there before it is asked.

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


def _core_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer as llguidance reads it: one that marks blanks by Metaspace as one that replaces them.

    To the library the marks of Metaspace are characters of the text, so that no text with a blank keeps to a grammar.

    Raises: ValueError for one without a core in Rust.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("only fast tokenizers are supported")
    core = json.loads(backend.to_str())
    core["truncation"] = core["padding"] = None
    decoder = core.get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    marks = [step["replacement"] for step in steps if step.get("type") == "Metaspace"]
    if marks:
        blanks = {"type": "Replace", "pattern": {"String": marks[0]}, "content": " "}
        core["decoder"] = {"type": "Sequence", "decoders": [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        core["pre_tokenizer"] = None
        core["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": marks[0]}
    return json.dumps(core)


def _closed() -> CardError:
    return CapacityError("the model is being closed and takes no more grammars")


def _too_much(grammar: Grammar, reason: str) -> str:
    return f"the {grammar.kind} grammar cannot be used: {reason}"


def _refusal(grammar: Grammar, reason: str) -> str:
    said = first_line(reason).replace(
        _ONE_OF, "it is not known whether the alternatives of oneOf exclude each other; use anyOf"
    )
    return f"the {grammar.kind} of grammar cannot be used: {said}; correct it or leave grammar out"
