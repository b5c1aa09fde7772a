"""Grammars compiled for a model's tokens. The work is done by llguidance, an optional package."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from card.config import Grammar
from card.errors import CardError, SettingsError, TargetError
from card.text.matcher import MatcherState, first_line
from card.tree.masks import GrammarState

logger = logging.getLogger(__name__)

_NUM_COMPILERS = 4  # threads; a grammar that takes minutes keeps one of them
_MOST_KEPT = 32  # compiled grammars; the one not used for longest makes place
_ONE_OF = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_JSON_OBJECT = '{"type": "object"}'
# A blank, or a new line with its indentation: a model that likes white space must not go on with it for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,20})?"}


class GrammarCompiler:
    """Compiles grammars for the tokens of one model. Any thread may call it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Take the tokenizer; nothing is imported or built until a grammar comes.

        Args:
            vocab_size: of the model, whose embedding may have rows without a token.
            end_ids: tokens that end a text.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(sorted(end_ids))
        self._lock = threading.Lock()  # held for moments only: a grammar may take minutes
        self._tokens_lock = threading.Lock()
        self._tokens: Any = None  # llguidance's own tokenizer; it takes about a second to build
        self._threads = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="card-grammar")
        self._begun: dict[Grammar, Future[MatcherState]] = {}  # least recently used first

    @property
    def is_compiling(self) -> bool:
        """True if a grammar is being compiled, which nothing can end."""
        return any(work.running() for work in list(self._begun.values()))

    def begin(self, grammar: Grammar, *, retries: bool = True) -> Future[MatcherState]:
        """Have a grammar compiled in a thread; those who ask for the same one share the work. Raises: nothing.

        The result is to be forked. It fails with what `compile` raises.

        Args:
            retries: compile it again if that failed before.
        """
        with self._lock:
            work = self._begun.pop(grammar, None)
            if work is None or (retries and work.done() and work.exception() is not None):
                work = self._threads.submit(self.build, grammar)
            self._begun[grammar] = work
            done = [one for one, begun in self._begun.items() if begun.done()]
            if len(done) > _MOST_KEPT:
                del self._begun[done[0]]
        return work

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the beginning of a grammar; at once if it is known, even while others are being compiled.

        Raises: SettingsError if llguidance is missing, or cannot use the grammar, the tokenizer or its end tokens, or
            if no text keeps to the grammar.
        """
        return self.begin(grammar).result().fork()

    def find(self, grammar: Grammar) -> GrammarState | None:
        """Return the beginning of a grammar; None while it is compiled, or if it cannot be: a drafter does without."""
        is_new = grammar not in self._begun
        work = self.begin(grammar, retries=False)
        if is_new:
            work.add_done_callback(_tell_of_failure)
        return work.result().fork() if work.done() and work.exception() is None else None

    def build(self, grammar: Grammar) -> MatcherState:
        """Compile in this thread. Raises: what `compile` raises."""
        library = _library()
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = self._wrapped(library)
        kinds = library.LLMatcher
        try:
            match grammar.kind:
                case "regex":
                    source = kinds.grammar_from_regex(grammar.source)
                case "lark":
                    source = kinds.grammar_from_lark(grammar.source)
                case _:
                    source = kinds.grammar_from_json_schema(grammar.source or _JSON_OBJECT, overrides=_JSON_OPTIONS)
        except ValueError as error:
            raise SettingsError(_refusal(grammar, str(error))) from error
        matcher = library.LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            raise SettingsError(_refusal(grammar, matcher.get_error()))
        state = MatcherState(matcher, self._tokens.vocab_size, frozenset(self._end_ids))
        if not _can_begin(state):
            raise SettingsError(_refusal(grammar, "no text can keep to it; does it need a part that needs itself?"))
        if not state.can_be_begun():
            forced = matcher.compute_ff_bytes().decode("utf-8", "replace")
            reason = f"this model has no token to begin a text of it, which begins with {forced!r}"
            raise SettingsError(
                _refusal(grammar, reason if forced else "this model has no token to begin a text of it")
            )
        return state

    def _wrapped(self, library: Any) -> Any:
        if not self._end_ids:
            raise SettingsError("a grammar needs a model with an end token, and this one has none; leave grammar out")
        num_ids = max(self._vocab_size, len(self._tokenizer))
        try:
            return library.LLTokenizer(_core_of(self._tokenizer), n_vocab=num_ids, eos_token=list(self._end_ids))
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
    if (error := work.exception()) is not None:
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


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise SettingsError(
            "a grammar needs the package llguidance, which is not installed; run pip install 'card-decoding[grammar]'"
        ) from error
    return llguidance


def _refusal(grammar: Grammar, reason: str) -> str:
    said = first_line(reason).replace(
        _ONE_OF, "it is not known whether the alternatives of oneOf exclude each other; use anyOf"
    )
    return f"the {grammar.kind} of grammar cannot be used: {said}; correct it or leave grammar out"
