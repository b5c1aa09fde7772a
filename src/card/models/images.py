"""Images in prompts: the rows that their features take in a text.

The features of an image stand in the places of copies of one token (LLaVA, arXiv:2304.08485). Some models also give
these places angles of their own, for height and width (Qwen2-VL, arXiv:2409.12191).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from card.kernels.number_types import Floats
from card.models.protocol import LanguageModel

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image as the vision tower reads it."""

    digest: bytes  # of all that the tower reads
    inputs: Mapping[str, Any]
    grid: tuple[int, int]  # rows and columns of the tokens that it takes

    @property
    def num_tokens(self) -> int:
        """Number of places that it takes in a text."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImages:
    """The images of one prompt and where they stand, in the order of the text."""

    images: tuple[PromptImage, ...]
    starts: tuple[int, ...]  # place of the first token of each

    @property
    def num_tokens(self) -> int:
        """Number of places that all images take together."""
        return sum(image.num_tokens for image in self.images)

    def keyed(self, token_ids: Sequence[int]) -> IntArray:
        """Return a beginning of the text with numbers below 0 for places of images, the same for equal images only."""
        keys = np.array(token_ids, np.int64)
        for image, start in zip(self.images, self.starts, strict=True):
            words = np.frombuffer(image.digest, np.int64) | np.int64(np.iinfo(np.int64).min)
            places = keys[start : start + image.num_tokens]
            places[:] = np.resize(words, image.num_tokens)[: len(places)]
        return keys

    def left_out_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the whole text without the places of images."""
        shown: list[int] = []
        last = 0
        for image, start in zip(self.images, self.starts, strict=True):
            shown += token_ids[last:start]
            last = start + image.num_tokens
        return shown + list(token_ids[last:])

    def rows_left(self, first: int, rows: Floats) -> tuple[int, Floats]:
        """Return rows [n, D] of a text without those of images.

        Args:
            first: place of the first row in the text.
        Returns: the place of the first row that is left in a text without images, and the rows.
        """
        places = np.arange(first, first + len(rows))
        is_left, num_before = np.ones(len(rows), np.bool_), 0
        for image, start in zip(self.images, self.starts, strict=True):
            is_left &= (places < start) | (places >= start + image.num_tokens)
            num_before += min(max(first - start, 0), image.num_tokens)
        return first - num_before, rows[is_left]

    def rotary_positions(self, places: IntArray) -> IntArray:
        """Return the positions in time, height and width that rows at these places are turned by, [3, T].

        Source: Qwen2-VL, section 2.1: an image moves what follows it on by its longer side.
        """
        positions = np.tile(places, (3, 1))
        for image, start in zip(self.images, self.starts, strict=True):
            end, (height, width) = start + image.num_tokens, image.grid
            inside, behind = (places >= start) & (places < end), places >= end
            moved = positions[0, inside] - (places[inside] - start)  # that of the image's first place
            row, column = np.divmod(places[inside] - start, width)
            positions[:, inside] = np.stack([moved, moved + row, moved + column])
            positions[:, behind] += max(height, width) - image.num_tokens
        return positions


class ImagePrompt(tuple[int, ...]):
    """The token ids of a prompt with images; it stands wherever other token ids do."""

    images: PlacedImages

    @classmethod
    def of(cls, token_ids: Sequence[int], images: PlacedImages) -> ImagePrompt:
        """Return the prompt."""
        prompt = cls(token_ids)
        prompt.images = images
        return prompt


@runtime_checkable
class Seeing(LanguageModel, Protocol):
    """A model that may have a vision tower."""

    def show(self, slot: int, images: PlacedImages | None) -> None:
        """Let the rows of a sequence be those of a text with these images from now on; None: without images."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """The rows of one pass without a plain embedding: in places of images, and those of `Extension.inputs`."""

    rows: IntArray  # [n] of the pass
    features: Floats  # [n, D], or more: see `Extension.inputs`
    axes: IntArray | None  # [channels that turn]: time 0, height 1 or width 2; None: positions have one axis


class Tower(Protocol):
    """The part of a multimodal model that makes rows out of images."""

    image_token_id: int
    sections: tuple[int, ...]
    """Channels of each axis that a text model turns by; empty if all turn by the place alone."""

    @property
    def axes(self) -> IntArray | None:
        """Axis of each channel that turns, [D]; None if all turn by the place alone."""

    def prepare(self, picture: Picture) -> PromptImage:
        """Return a picture as the tower reads it. Raises: PromptError if the processor cannot use it."""

    def place(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> ImagePrompt:
        """Return a prompt in which each image has its places, out of one with an image token for each image.

        Raises: PromptError if there are more or fewer of these tokens.
        """

    def features(self, image: PromptImage) -> Floats:
        """Return the features of an image in the width of the text model, [tokens, D]."""


class ShownImages:
    """The images of running sequences, and their features as far as passes have needed them."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self._axes = tower.axes
        self._of_slots: dict[int, PlacedImages] = {}
        self._features: dict[bytes, Floats] = {}  # by digest

    def show(self, slot: int, images: PlacedImages | None) -> None:
        """Take the images of a sequence; None forgets those that it had."""
        self._of_slots.pop(slot, None)
        if images is not None:
            self._of_slots[slot] = images
        used = {image.digest for placed in self._of_slots.values() for image in placed.images}
        self._features = {digest: features for digest, features in self._features.items() if digest in used}

    def positions(self, slots: Sequence[int], places: Sequence[IntArray]) -> IntArray:
        """Return the positions that rows at ``places`` of sequences are turned by: [sum T], or [3, sum T]."""
        if self._axes is None or not any(slot in self._of_slots for slot in slots):
            return np.concatenate(places)
        turned = []
        for slot, positions in zip(slots, places, strict=True):
            images = self._of_slots.get(slot)
            turned.append(np.tile(positions, (3, 1)) if images is None else images.rotary_positions(positions))
        return np.concatenate(turned, axis=1)

    def rows(self, slots: Sequence[int], places: Sequence[IntArray]) -> ImageRows | None:
        """Return what stands in places of images in a pass; None if no sequence of it has images."""
        if not any(slot in self._of_slots for slot in slots):
            return None
        rows: list[IntArray] = []
        features: list[Floats] = []
        offset = 0
        for slot, positions in zip(slots, places, strict=True):
            images = self._of_slots.get(slot)
            for image, start in zip(images.images, images.starts, strict=True) if images is not None else ():
                inside = np.flatnonzero((positions >= start) & (positions < start + image.num_tokens))
                if len(inside):
                    rows.append(offset + inside)
                    features.append(self._features_of(image)[positions[inside] - start])
            offset += len(positions)
        if not rows:
            return ImageRows(np.zeros(0, np.int64), np.zeros((0, 0), np.float32), self._axes)
        return ImageRows(np.concatenate(rows), np.concatenate(features), self._axes)

    def _features_of(self, image: PromptImage) -> Floats:
        if image.digest not in self._features:
            self._features[image.digest] = self.tower.features(image)
        return self._features[image.digest]
