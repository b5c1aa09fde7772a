"""Masks of a grammar: which tokens may follow a text and each candidate path below it, within a bound on time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from card.errors import GrammarError

Path = Sequence[int]
"""Tokens that follow the committed text."""

MaskRow = npt.NDArray[np.bool_]
"""Flags of the tokens that may follow: [W], of ids 0 .. W - 1; none beyond."""

TOKEN_LIMIT_S = 0.2  # of one step: some of them hold the whole process up, and an ordinary one takes milliseconds


class GrammarState(Protocol):
    """Progress of one text in its grammar. Its calls never run at once."""

    def fork(self) -> GrammarState:
        """Return a state at the beginning of the same grammar."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take committed tokens. If the grammar forbids one of them, `allowed` raises from then on."""

    def allowed(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow the text and each path: [N, W], of ids 0 .. W - 1; none beyond.

        A row whose path is forbidden itself, or has come to the end, allows everything: no text goes on from there.
        Raises: GrammarError if the grammar is too costly to follow there; the state is as before.
        """

    def forced(self, path: Path) -> Sequence[int]:
        """Return the tokens that must follow the text and a path, as the tokenizer splits them: a guess for `allowed`.

        Empty if there is a choice, or if the text ends there.
        Raises: GrammarError as `allowed` does.
        """


class Masks(Protocol):
    """The masks of one text, which shape its logits."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take committed tokens."""

    def rows(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
        """Return the masks after each path, as of `GrammarState.allowed`. Raises: GrammarError if there are none."""


class TimeSpent:
    """Seconds that following one text's grammar has taken, and the most that it may take."""

    def __init__(self, limit_s: float, step_limit_s: float = TOKEN_LIMIT_S) -> None:
        """Take the most seconds of the whole text, ``limit_s``, and of one step, ``step_limit_s``."""
        self._limit_s, self._step_limit_s = limit_s, step_limit_s
        self._total_s = 0.0
        self._was_long = False

    def add(self, seconds: float) -> None:
        """Count a step. Raises: GrammarError if it and the one before, or all of them together, took too long.

        One long step alone may be Python's garbage collection or a pause of the machine, which the clock counts too.
        """
        self._total_s += seconds
        is_long = seconds > self._step_limit_s
        is_second, self._was_long = is_long and self._was_long, is_long
        if is_second:
            raise GrammarError(
                f"the grammar took {seconds:.2f} s for one token, and {self._step_limit_s:g} s are allowed; use a "
                "simpler one"
            )
        if self._total_s > self._limit_s:
            raise GrammarError(
                f"the grammar took more than {self._limit_s:g} s for one text; use a simpler one, or raise the limit "
                "(--grammar-timeout)"
            )


class MasksAtOnce:
    """Masks that are computed when they are asked for, for a caller that can do without a grammar that takes long."""

    def __init__(self, state: GrammarState, spent: TimeSpent, clock: Callable[[], float] = time.thread_time) -> None:
        """Begin. ``clock``: seconds of work of the calling thread."""
        self._state, self._spent, self._clock = state, spent, clock
        self._advancing_s = 0.0  # since masks were asked for last

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take committed tokens; the time this takes counts at the next `rows`."""
        started = self._clock()
        self._state.advance(token_ids)
        self._advancing_s += self._clock() - started

    def rows(self, paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
        """Return the masks after each path. Raises: GrammarError, also if they took too long."""
        started = self._clock()
        rows = self._state.allowed(paths)
        seconds, self._advancing_s = self._clock() - started + self._advancing_s, 0.0
        self._spent.add(seconds)
        return rows
