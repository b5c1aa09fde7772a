"""The vision tower of a multimodal checkpoint, built by transformers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from card.backends.transformers.arrays import as_array
from card.errors import ModelError, PromptError, in_few_words
from card.kernels.number_types import Floats
from card.models.images import ImagePrompt, PlacedImages, PromptImage
from card.models.rows.row_tree import IntArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

IMAGE_FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl")
_GRID = "image_grid_thw"
_LANGUAGE_MODEL = "language_model"


class VisionTower:
    """Vision tower and projector of one checkpoint, with its image processor."""

    def __init__(self, whole: Any, processor: Any) -> None:
        """Use vision tower and projector of a model of transformers; its text model is dropped."""
        config = whole.config
        self.config = config
        self.image_token_id = int(config.image_token_id)
        self._tower: Any = whole.model
        setattr(self._tower, _LANGUAGE_MODEL, nn.Identity())
        self._processor = processor
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        self.sections: tuple[int, ...] = tuple(rope.get("mrope_section", ()))

    @property
    def axes(self) -> IntArray | None:
        """Axis of each rotated channel, [D]; None if all rotate by the position only."""
        if not self.sections:
            return None
        halves = [axis % 3 for axis, size in enumerate(self.sections) for _ in range(size)]
        return np.array([*halves, *halves])

    def prepare(self, picture: Picture) -> PromptImage:
        """Return a picture as input of the tower. Raises: PromptError if the processor cannot use it."""
        try:
            read = self._processor(images=picture, return_tensors="pt")
        except Exception as error:  # processors raise many types
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
        """Return a prompt with the places of each image.

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

    @torch.inference_mode()
    def features(self, image: PromptImage) -> Floats:
        """Return the features of an image in the width of the text model, [tokens, D]."""
        like = next(self._tower.parameters())
        inputs = {name: tensor.to(like.device) for name, tensor in image.inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(like.dtype)
        out = self._tower.get_image_features(**inputs)
        features: Floats = as_array(torch.cat(list(out.pooler_output)).to(like.dtype))
        if len(features) != image.num_tokens:
            raise ModelError(
                f"the vision tower makes {len(features)} features of an image that has {image.num_tokens} places; its "
                "config.json and preprocessor_config.json do not fit, copy or download them again"
            )
        return features


def read_tower(path: str, *, dtype: str, device: str, options: Mapping[str, Any]) -> VisionTower:
    """Read vision tower, projector and image processor of a multimodal checkpoint.

    Args:
        options: further arguments of transformers' loaders.
    Raises: ModelError for another family; errors of any type if a file is damaged.
    """
    config: Any = transformers.AutoConfig.from_pretrained(path, **options)
    if config.model_type not in IMAGE_FAMILIES:
        raise ModelError(f"{config.model_type} models take no images here; those of {', '.join(IMAGE_FAMILIES)} do")
    processor_class: Any = transformers.AutoImageProcessor
    processor = processor_class.from_pretrained(path, backend="pil", **options)
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 0  # the text model is loaded elsewhere
    if getattr(text, "layer_types", None):
        text.layer_types = []
    loader: Any = transformers.AutoModelForImageTextToText
    whole, report = loader.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **options)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{len(missing)} tensors of its vision tower are missing, the first is {missing[0]}")
    return VisionTower(whole.to(device).requires_grad_(False).train(False), processor)
