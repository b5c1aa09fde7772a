"""Images in prompts: the vision tower of a multimodal checkpoint, and the rows that its features take in a text.

The features of an image stand in the places of copies of one token (LLaVA, arXiv:2304.08485). Some models also give
these places angles of their own, for height and width (Qwen2-VL, arXiv:2409.12191).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn

from card.errors import ModelError, PromptError, in_few_words
from card.models.protocol import LanguageModel

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

IntArray = npt.NDArray[np.int64]
IMAGE_FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl")
_GRID = "image_grid_thw"
_LANGUAGE_MODEL = "language_model"


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image as the vision tower reads it."""

    digest: bytes  # of all that the tower reads
    inputs: Mapping[str, Tensor]
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
    """The rows of one pass without a plain embedding: in places of images, and those that `Extension.added` changes."""

    rows: Tensor  # [n] int64, of the pass
    features: Tensor  # [n, D]
    axes: Tensor | None  # [channels that turn] int64: time 0, height 1 or width 2; None: positions have one axis


class VisionTower:
    """Vision tower and projector of one checkpoint, with its image processor."""

    def __init__(self, whole: Any, processor: Any) -> None:
        """Take over the parts that see of a model of transformers; its text model is let go of."""
        config = whole.config
        self.config = config
        self.image_token_id = int(config.image_token_id)
        self._tower: Any = whole.model
        setattr(self._tower, _LANGUAGE_MODEL, nn.Identity())
        self._processor = processor
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        self.sections: tuple[int, ...] = tuple(rope.get("mrope_section", ()))

    @property
    def axes(self) -> Tensor | None:
        """Axis of each channel that turns, [D]; None if all turn by the place alone."""
        if not self.sections:
            return None
        halves = [axis % 3 for axis, size in enumerate(self.sections) for _ in range(size)]
        return torch.tensor([*halves, *halves])

    def prepare(self, picture: Picture) -> PromptImage:
        """Return a picture as the tower reads it. Raises: PromptError if the processor cannot use it."""
        try:
            read = self._processor(images=picture, return_tensors="pt")
        except Exception as error:  # processors raise almost anything
            raise PromptError(f"the model cannot use the image: {in_few_words(error)}; give another one") from error
        inputs = {name: read[name] for name in ("pixel_values", _GRID) if name in read}
        digest = hashlib.sha256()
        for tensor in inputs.values():
            digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        return PromptImage(digest.digest(), inputs, self._grid(inputs))

    def _grid(self, inputs: Mapping[str, Tensor]) -> tuple[int, int]:
        if _GRID in inputs:
            merged = int(self.config.vision_config.spatial_merge_size)
            _, height, width = inputs[_GRID][0].tolist()
            return height // merged, width // merged
        patch, (height, width) = int(self.config.vision_config.patch_size), inputs["pixel_values"].shape[-2:]
        if self.config.vision_feature_select_strategy == "default":
            return height // patch, width // patch
        return 1, (height // patch) * (width // patch) + 1  # with the class token, which has no place in a grid

    def place(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> ImagePrompt:
        """Return a prompt in which each image has its places.

        Args:
            token_ids: with one image token for each image.
        Raises: PromptError if there are more or fewer of these tokens.
        """
        num_found = list(token_ids).count(self.image_token_id)
        if num_found != len(images):
            raise PromptError(
                f"the prompt has {num_found} places for {len(images)} images: the chat template leaves images out, or "
                "a text has the token that stands for images; leave that out"
            )
        placed: list[int] = []
        starts: list[int] = []
        left = iter(images)
        for token_id in token_ids:
            if token_id == self.image_token_id:
                starts.append(len(placed))
                placed += [token_id] * next(left).num_tokens
            else:
                placed.append(token_id)
        return ImagePrompt.of(placed, PlacedImages(tuple(images), tuple(starts)))

    def features(self, image: PromptImage) -> Tensor:
        """Return the features of an image in the width of the text model, [tokens, D]."""
        like = next(self._tower.parameters())
        inputs = {name: tensor.to(like.device) for name, tensor in image.inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(like.dtype)
        out = self._tower.get_image_features(**inputs)
        found = torch.cat(list(out.pooler_output)).to(like.dtype)
        if len(found) != image.num_tokens:
            raise ModelError(
                f"the vision tower makes {len(found)} features of an image that has {image.num_tokens} places; its "
                "config.json and preprocessor_config.json do not fit, copy or download them again"
            )
        return found


def read_tower(path: str, *, dtype: torch.dtype, device: torch.device, options: Mapping[str, Any]) -> VisionTower:
    """Read the parts of a multimodal checkpoint that see.

    Args:
        options: what transformers' loaders are told besides.
    Raises: ModelError for another family; almost anything if a file is damaged.
    """
    config: Any = transformers.AutoConfig.from_pretrained(path, **options)
    if config.model_type not in IMAGE_FAMILIES:
        raise ModelError(f"{config.model_type} models take no images here; those of {', '.join(IMAGE_FAMILIES)} do")
    processor_class: Any = transformers.AutoImageProcessor
    processor = processor_class.from_pretrained(path, backend="pil", **options)
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 0  # the text model is read elsewhere
    if getattr(text, "layer_types", None):
        text.layer_types = []
    loader: Any = transformers.AutoModelForImageTextToText
    whole, report = loader.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **options)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{len(missing)} tensors of its vision tower are missing, the first is {missing[0]}")
    return VisionTower(whole.to(device).requires_grad_(False).train(False), processor)


class ShownImages:
    """The images of running sequences, and their features as far as passes have needed them."""

    def __init__(self, tower: VisionTower) -> None:
        self.tower = tower
        self._axes = tower.axes
        self._of_slots: dict[int, PlacedImages] = {}
        self._features: dict[bytes, Tensor] = {}  # by digest

    def show(self, slot: int, images: PlacedImages | None) -> None:
        """Take the images of a sequence; None forgets those that it had."""
        self._of_slots.pop(slot, None)
        if images is not None:
            self._of_slots[slot] = images
        used = {image.digest for placed in self._of_slots.values() for image in placed.images}
        self._features = {digest: found for digest, found in self._features.items() if digest in used}

    def positions(self, slots: Sequence[int], places: Sequence[IntArray]) -> IntArray:
        """Return the positions that rows at ``places`` of sequences are turned by: [sum T], or [3, sum T]."""
        if self._axes is None or not any(slot in self._of_slots for slot in slots):
            return np.concatenate(places)
        turned = []
        for slot, own in zip(slots, places, strict=True):
            images = self._of_slots.get(slot)
            turned.append(np.tile(own, (3, 1)) if images is None else images.rotary_positions(own))
        return np.concatenate(turned, axis=1)

    def rows(
        self, slots: Sequence[int], places: Sequence[IntArray], to_device: Callable[[IntArray], Tensor]
    ) -> ImageRows | None:
        """Return what stands in places of images in a pass; None if no sequence of it has images."""
        if not any(slot in self._of_slots for slot in slots):
            return None
        rows: list[IntArray] = []
        features: list[Tensor] = []
        offset = 0
        for slot, own in zip(slots, places, strict=True):
            images = self._of_slots.get(slot)
            for image, start in zip(images.images, images.starts, strict=True) if images is not None else ():
                inside = np.flatnonzero((own >= start) & (own < start + image.num_tokens))
                if len(inside):
                    rows.append(offset + inside)
                    features.append(self._features_of(image)[to_device(own[inside] - start)])
            offset += len(own)
        found = torch.cat(features) if features else torch.empty(0)
        axes = None if self._axes is None else self._axes.to(found.device)
        return ImageRows(to_device(np.concatenate(rows) if rows else np.zeros(0, np.int64)), found, axes)

    def _features_of(self, image: PromptImage) -> Tensor:
        if image.digest not in self._features:
            self._features[image.digest] = self.tower.features(image)
        return self._features[image.digest]
