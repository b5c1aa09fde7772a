"""Weights in 8-bit floats with their scales, made into the weights that they stand for.

Three layouts are common: ModelOpt's and compressed-tensors' `weight_scale`, of a tensor or of each row, and
DeepSeek's `weight_scale_inv`, of blocks of 128 by 128. All mean weight * scale. The static scales of activations and
of KV caches are left aside: both are kept in more bits here, which is closer to the model before it was quantised.
Sources: https://huggingface.co/docs/transformers/quantization/finegrained_fp8,
https://github.com/vllm-project/compressed-tensors, https://github.com/NVIDIA/Model-Optimizer
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from card.kernels.number_types import Array, Dtype
from card.models.files.tensor_files import MappedTensors
from card.models.files.weight_files import FolderError, Shapes, raw_config, stored_tensors, weight_files

logger = logging.getLogger(__name__)

QUANTIZED = ("quantization_config", "compression_config")  # fields of config.json that say how weights are stored
_FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES = ("_scale", "_scale_inv")  # behind the name of a weight
_LEFT_ASIDE = re.compile(r"(^|\.)((input|output|[qkv]|kv|attn|prob|prob_output)_scale|activation_scale)(_inv)?$")
# Names of numbers of four bits, of which several are one stored number, by what makes them.
_PACKED = {"weight_packed": "compressed-tensors", "weight_scale_2": "ModelOpt (NVFP4)", "weight_global_scale": "NVFP4"}
_INSTEAD = "use the model's folder in bfloat16 or in 8-bit floats, or a GGUF file"


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """The weights of a folder, some of them in 8-bit floats."""

    files: Mapping[str, Path]  # by the name of a tensor that is taken
    scales: Mapping[str, str]  # of the weights in 8-bit floats, the names of their scales
    scale_files: Mapping[str, Path]
    block: tuple[int, int] | None  # rows and columns that share a scale, where scales have two dimensions

    def shapes(self, shapes: Shapes) -> Shapes:
        """Return those shapes that are of the model's weights."""
        return {name: shape for name, shape in shapes.items() if name in self.files}

    def read(self, dtype: Dtype) -> dict[str, Array]:
        """Return all weights. Raises: FolderError that names a scale which does not fit."""
        return dict(self._read(dtype))

    def _read(self, dtype: Dtype) -> Iterator[tuple[str, Array]]:
        opened = {path: MappedTensors(path).arrays for path in {*self.files.values(), *self.scale_files.values()}}
        for name, path in self.files.items():
            weight = opened[path][name]
            if name in self.scales:
                scale_name = self.scales[name]
                scale = opened[self.scale_files[scale_name]][scale_name].astype(np.float32)
                weight = weight.astype(np.float32) * self._spread(scale, weight.shape, scale_name)
            yield name, weight if weight.dtype.kind in "iub" else weight.astype(dtype, copy=False)

    def _spread(self, scale: Array, shape: tuple[int, ...], name: str) -> Array:
        """Return a scale so that it can be multiplied with a weight of a shape."""
        if not np.isfinite(scale).all():
            raise FolderError(f"{name} is no finite number; download it again")
        if scale.size == 1:
            return scale.reshape(())
        if scale.ndim == 1 and scale.shape[0] == shape[0]:
            return scale.reshape(-1, *(1 for _ in shape[1:]))
        if scale.ndim == len(shape):
            sizes = (*(1 for _ in shape[2:]), *self.block) if self.block else tuple(1 for _ in shape)
            fits = True
            for dim, (num_scales, num_values, size) in enumerate(zip(scale.shape, shape, sizes, strict=True)):
                if num_scales not in (1, num_values):
                    fits = fits and -(-num_values // size) == num_scales
                    scale = np.repeat(scale, size, dim).take(range(num_values), dim) if fits else scale
            if fits:
                return scale
        raise FolderError(f"{name} has shape {list(scale.shape)}, which fits no weight of {list(shape)}; {_INSTEAD}")


def find_scaled(folder: Path) -> ScaledWeights | None:
    """Return the weights of a folder that has some in 8-bit floats; None if it has none.

    Raises: FolderError that names a tensor which is packed, or has no scale; OSError, ValueError if it cannot be read.
    """
    dtypes, places = {}, {}
    for path in weight_files(folder):
        for name, stored in stored_tensors(path).items():
            dtypes[name], places[name] = stored.dtype, path
    _check_packed(dtypes)
    if _FLOAT8.isdisjoint(dtypes.values()):
        return None
    scales = {name: _scale_of(name, places) for name, dtype in dtypes.items() if dtype in _FLOAT8}
    taken = set(scales.values())
    files = {name: path for name, path in places.items() if name not in taken and not _LEFT_ASIDE.search(name)}
    return ScaledWeights(files, scales, {name: places[name] for name in taken}, _block(folder))


def is_left_aside(name: str) -> bool:
    """Return whether a tensor is a scale of activations or of a KV cache, both of which have more bits here."""
    return _LEFT_ASIDE.search(name) is not None


def say_scaled(folder: Path, scaled: ScaledWeights, dtype: Dtype) -> None:
    """Log what becomes of the weights."""
    logger.info(
        "%s: %d weights in 8-bit floats are multiplied by their scales to %s", folder, len(scaled.scales), dtype.name
    )


def _check_packed(names: Mapping[str, str]) -> None:
    if find_spec("compressed_tensors") is not None:
        return  # with which transformers reads them
    for name in names:
        maker = _PACKED.get(name.rpartition(".")[2])
        if maker is not None:
            raise FolderError(f"they are packed to fewer bits by {maker} ({name}), which is not read here; {_INSTEAD}")


def _scale_of(name: str, places: Mapping[str, Path]) -> str:
    scale_name = next((name + end for end in _SCALES if name + end in places), None)
    if scale_name is None:
        raise FolderError(f"{name} is in 8-bit floats and has no {name.rpartition('.')[2]}_scale; {_INSTEAD}")
    return scale_name


def _block(folder: Path) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale by what config.json says; None if it says nothing of it."""
    config = raw_config(folder)
    for field in QUANTIZED:
        stated = config.get(field) if isinstance(config, dict) else None
        for size in _block_sizes(stated):
            if isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size):
                return size[0], size[1]
    return None


def _block_sizes(stated: Any) -> Iterator[Any]:
    if not isinstance(stated, dict):
        return
    yield stated.get("weight_block_size")
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        yield weights.get("block_structure") if isinstance(weights, dict) else None


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says without how weights are stored."""
    inner = {name: unquantized(one) for name, one in config.items() if name == "text_config" and isinstance(one, dict)}
    return {**{name: one for name, one in config.items() if name not in QUANTIZED}, **inner}
