"""One grammar while it is compiled, and its compiled form."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from card.config import Grammar
from card.errors import SettingsError
from card.text.compiler_pool import Job
from card.text.grammar_sandbox import SandboxHolder
from card.text.matcher import MatcherState


class Compilation:
    """A grammar that is being compiled, or was; requests with the same grammar share it."""

    def __init__(self, grammar: Grammar) -> None:
        """Begin with a grammar that no thread works on."""
        self.grammar = grammar
        self.clients: set[str] = set()  # whose queues hold it
        self.future: Future[MatcherState] = Future()
        self.num_waiting = 0  # requests that wait for it
        self.limit_s = 0.0  # the longest that one of them waits
        self.job: Job | None = None  # until it is begun
        self.trial: SandboxHolder | None = None  # where it is tried, while it is
        self.is_given_up = False

    @property
    def is_worth_a_retry(self) -> bool:
        """True if it was given up, or failed for a reason that may pass."""
        if not self.future.done() or self.future.cancelled():
            return self.is_given_up
        error = self.future.exception()
        return error is not None and not isinstance(error, UnusableGrammarError)


class Charge:
    """The memory of a compiled grammar, counted until its last copy is gone."""

    __slots__ = ("__weakref__", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class Start:
    """A matcher at the beginning of its grammar, from which all others are copied."""

    __slots__ = ("_charge", "_matcher")

    def __init__(self, matcher: Any, charge: Charge) -> None:
        """Take the matcher, which stays as it is, and its memory."""
        self._matcher, self._charge = matcher, charge

    def deep_copy(self) -> Any:
        """Return a matcher to follow a text with."""
        return self._matcher.deep_copy()


class UnusableGrammarError(SettingsError):
    """A grammar that can never be used."""
