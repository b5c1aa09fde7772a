"""Stop strings in a text that grows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_FIRST_MARK = 0xD800  # surrogates: no decoder makes one, so that they can stand for tokens that have no text


class StopMarks:
    """Characters that stand in stop strings for the special tokens that the text leaves out.

    A stop string with the text of such a token is looked for twice: as it is, and with a mark in the token's place.
    """

    def __init__(self, stops: Sequence[str], silent_tokens: Mapping[int, str]) -> None:
        """Take the stop strings, and the tokens that the text leaves out by their ids."""
        all_stops = "\0".join(stops)
        stopping = {i: text for i, text in silent_tokens.items() if text and text in all_stops}
        self.of_token = {token_id: chr(_FIRST_MARK + idx) for idx, token_id in enumerate(stopping)}
        self.ends = {token_id: text for token_id, text in stopping.items() if text in stops}
        by_text = {text: self.of_token[token_id] for token_id, text in stopping.items()}
        texts = re.compile("|".join(map(re.escape, sorted(by_text, key=len, reverse=True))))
        marked = [texts.sub(lambda match: by_text[match[0]], stop) for stop in stops] if stopping else []
        self.stops = tuple(dict.fromkeys([*stops, *marked]))
        self._nothing = dict.fromkeys(map(ord, self.of_token.values()))
        self._texts = {ord(mark): stopping[token_id] for token_id, mark in self.of_token.items()}

    @property
    def end_ids(self) -> frozenset[int]:
        """The special tokens that are stop strings by themselves."""
        return frozenset(self.ends)

    def removed(self, text: str) -> str:
        """Return a text without the marks."""
        return text.translate(self._nothing) if self._nothing else text

    def met(self, found: str | None, last_ids: Sequence[int]) -> str:
        """Return the stop string that ended a text, as it was asked for; empty if none did.

        Args:
            found: in the text, with its marks.
            last_ids: the text's last tokens.
        """
        if found is not None:
            return found.translate(self._texts)
        return self.ends.get(last_ids[-1], "") if last_ids else ""


class StopStrings:
    """Ends a streamed text before the first stop string, wherever the borders between its pieces are.

    The first is the one that is complete first, and of two that end together the longer one: what reading character by
    character finds. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the stop strings, none of them empty; with none at all every text passes."""
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text; None while there is none."""
        return self._found

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add text and return what may be shown now; nothing more after a stop string.

        Args:
            may_end: False lets stop strings pass that are complete with this text.
        """
        if self._found is not None:
            return ""
        num_old = len(self._held)
        text = self._held + text
        starts = [(text.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stops if may_end]
        matches = [(start, stop) for start, stop in starts if start >= 0]  # what ended in the old text was let pass
        if matches:
            start, self._found = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return text[:start]
        num_held = next((n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def completes(self, text: str) -> bool:
        """Return whether a stop string would end just where this text does, if it were added."""
        return (self._held + text).endswith(self._stops)

    def flush(self) -> str:
        """Return the text that was held back, after the last piece; empty after a stop string."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)
