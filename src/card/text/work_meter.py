"""A meter for chat templates: steps and characters, counted before they are spent, with a bound on both.

Counts are the same on every machine. A step is about what an interpreter does in a microsecond. Long texts and lists
cost steps by their length, and everything that is made costs characters, so that both time and memory are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from jinja2.utils import Namespace

from card.errors import PromptError

# Without anything in the conversation; real templates take some hundred steps a message.
BASE_STEPS, BASE_CHARS = 3_000_000, 16_000_000
_STEPS_PER_VALUE, _CHARS_PER_CHAR = 100, 128  # for each value and each character of the conversation
# Of messages and tools: real templates go through all messages for each of them, or cut the list there.
_STEPS_PER_PAIR, _CHARS_PER_PAIR = 64, 16
_LONG_CHARS = 1 << 12  # of a text that is counted only as long as it is there: some templates let one grow bit by bit
_CHARS_PER_STEP = 256  # that are copied or looked at
_ITEMS_PER_STEP = 4
ITEM_CHARS = 8  # what a place in a list takes
_SIGN_CHARS = 8  # of punctuation around a value inside another
_MANY = 1 << 20  # values
_MOST_DEPTH = 500  # of values inside values
LISTS: Any = (
    list,
    tuple,
    set,
    frozenset,
    range,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
HOLDING: Any = (*LISTS, dict, Namespace)

T = TypeVar("T")


class TemplateCostError(PromptError):
    """A chat template takes more steps or makes more text than a conversation can need."""


class WorkMeter:
    """Counts down; each method raises TemplateCostError if not enough is left."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Allow what a template may need for these variables."""
        self._steps = self._chars = self._most_steps = self._most_chars = 1 << 62
        num_values, num_chars, _ = self.measure(values)
        num_parts = sum(len(values.get(name) or ()) for name in ("messages", "tools"))
        self._most_chars = BASE_CHARS + num_chars * _CHARS_PER_CHAR + num_parts**2 * _CHARS_PER_PAIR
        self._most_steps = BASE_STEPS + num_values * _STEPS_PER_VALUE + num_parts**2 * _STEPS_PER_PAIR
        self._most_steps += self._most_chars // _CHARS_PER_STEP
        self._steps, self._chars = self._most_steps, self._most_chars

    @property
    def share_used(self) -> float:
        """The share of the bound that is closer which has been used."""
        return 1 - min(self._steps / self._most_steps, self._chars / self._most_chars)

    def take(self, num_steps: int, num_chars: int = 0) -> None:
        """Count steps that are about to be taken, and characters that are about to be made."""
        self._steps -= num_steps
        self._chars -= num_chars
        if self._steps < 0 or self._chars < 0:
            limit = f"{self._most_steps:,} steps" if self._steps < 0 else f"{self._most_chars:,} characters of text"
            self._steps = self._chars = -1  # for good
            raise TemplateCostError(
                f"the chat template takes more than {limit}, which no conversation of this size can need; use a model "
                "with another chat template"
            )

    def look(self, *values: Any) -> None:
        """Count going once through texts and lists, without what is in them."""
        for value in values:
            if isinstance(value, str | bytes):
                self.take(len(value) // _CHARS_PER_STEP)
            elif isinstance(value, HOLDING) and not isinstance(value, Namespace):
                self.take(len(value) // _ITEMS_PER_STEP)

    def read(self, *values: Any) -> int:
        """Count going through everything in values, as writing, comparing or hashing them does.

        Returns: the characters in them.
        """
        total = 0
        for value in values:
            if isinstance(value, str | bytes):
                self.take(len(value) // _CHARS_PER_STEP)
                total += len(value)
            elif isinstance(value, HOLDING):
                num_values, num_chars, _ = self.measure(value)
                total += num_chars + num_values * _SIGN_CHARS
        return total

    def made(self, value: T) -> T:
        """Count the memory of a new value and return it; a long text counts until it is freed."""
        if isinstance(value, str | bytes):
            self.take(len(value) // _CHARS_PER_STEP, len(value))
            if type(value) is str and len(value) >= _LONG_CHARS:
                held = _Held(value)
                held.meter = self
                return cast(T, held)
        elif isinstance(value, HOLDING) and not isinstance(value, range | Namespace):
            self.take(len(value) // _ITEMS_PER_STEP, len(value) * ITEM_CHARS)
        return value

    def joined(self, text: T) -> T:
        """Return a text as `made` does, if its parts have been counted already."""
        if isinstance(text, str) and len(text) >= _LONG_CHARS and self._chars >= 0:
            self.gone(len(text))
            return self.made(text)
        return text

    def gone(self, num_chars: int) -> None:
        """Take back the count of a text that was freed."""
        if self._chars >= 0:
            self._chars += num_chars

    def measure(self, value: Any) -> tuple[int, int, int]:
        """Return how many values, characters and levels there are in a value; what stands in it twice counts twice."""
        num_values, num_chars, depth = 0, 0, 0
        level: Sequence[Any] = (value,)
        while level:
            self.take(len(level) // _ITEMS_PER_STEP)
            below: list[Any] = []
            for one in level:
                kind = type(one)
                if kind is str:
                    num_chars += len(one)
                elif kind is dict:
                    below.extend(one)
                    below.extend(one.values())
                elif isinstance(one, HOLDING):
                    below.extend(_parts(one))
                elif isinstance(one, str | bytes):
                    num_chars += len(one)
                if len(below) > _MANY:
                    self.take(len(below) // _ITEMS_PER_STEP)  # before there is no room for them
            num_values += len(level)
            depth += 1
            if depth > _MOST_DEPTH:
                raise PromptError(f"a value of the conversation has more than {_MOST_DEPTH} levels; make it flatter")
            level = below
        self.take(num_chars // _CHARS_PER_STEP)
        return num_values, num_chars, depth

    def compare(self, operator: str, left: Any, right: Any) -> None:
        """Count a comparison of two values."""
        if operator in ("in", "notin"):
            if isinstance(left, HOLDING):
                self.read(left)
                if not isinstance(right, dict):
                    self.read(right)
            elif isinstance(left, str) and isinstance(right, LISTS):
                self.take(len(left) * len(right) // _CHARS_PER_STEP + len(right) // _ITEMS_PER_STEP)
            elif not isinstance(right, dict):
                self.look(right)
        elif isinstance(left, HOLDING) and isinstance(right, HOLDING):
            self.read(left, right)
        elif isinstance(left, str | bytes) and isinstance(right, str | bytes):
            self.take(min(len(left), len(right)) // _CHARS_PER_STEP)

    def sort(self, value: Any) -> None:
        """Count comparing the parts of a value with each other until they are in order."""
        if isinstance(value, (str, *HOLDING)):
            num_values, num_chars, _ = self.measure(value)
            rounds = math.ceil(math.log2(num_values + num_chars + 2))
            self.take(num_values + rounds * (num_values // _ITEMS_PER_STEP + num_chars // _CHARS_PER_STEP))


class _Held(str):
    """A long text, which reports to the meter when it is freed."""

    meter: WorkMeter

    def __del__(self) -> None:
        self.meter.gone(len(self))


def _parts(value: Any) -> Sequence[Any]:
    """Return what is directly in a value."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Namespace):
        return _parts(getattr(value, "_Namespace__attrs", {}))
    return value if isinstance(value, list | tuple | range) else list(value)
