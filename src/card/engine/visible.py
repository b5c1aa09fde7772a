"""The text as a drafter reads it: without the places of images, and numbered without them.

A draft model that reads only text gains nothing from these positions and pays for each. The content of an image reaches
the drafter through the target's text. Source of the idea: HiViS, arXiv:2509.23928.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from card.models.images import PlacedImages


class VisibleText(Sequence[int]):
    """A growing text, seen without the images of its prompt."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int, images: PlacedImages) -> None:
        """View a text that others go on appending to; only its prompt contains images."""
        self._token_ids = token_ids
        self._num_hidden = images.num_tokens
        self._prompt = images.left_out_of(token_ids[:num_prompt_tokens])

    def __len__(self) -> int:
        return len(self._token_ids) - self._num_hidden

    @overload
    def __getitem__(self, idx: int) -> int: ...
    @overload
    def __getitem__(self, idx: slice) -> list[int]: ...
    def __getitem__(self, idx: int | slice) -> int | list[int]:
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if start >= len(self._prompt):
                return list(self._token_ids[start + self._num_hidden : stop + self._num_hidden : step])
            return [*self._prompt, *self._token_ids[len(self._prompt) + self._num_hidden :]][idx]
        place = range(len(self))[idx]
        return self._prompt[place] if place < len(self._prompt) else self._token_ids[place + self._num_hidden]
