"""Experts of folders in MXFP4, kept as passes read them: packed at the first start, and mapped from a file later."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from card.errors import ModelError
from card.kernels.number_types import Array, Dtype
from card.machine.container import num_usable_cores
from card.machine.memory import is_shortage
from card.models.architectures import Architecture
from card.models.files.kept_weights import KEPT_FOLDER, KeptWeights, state_of
from card.models.files.mapped_weights import MappedWeights
from card.models.files.tensor_files import tensors_written
from card.models.own.layers import Weight
from card.models.own.mxfp4_experts import ExpertBlocks, experts_in

logger = logging.getLogger(__name__)

_FORMAT = 1  # of what is kept; another number makes old entries useless
_NAME = "model.safetensors"


def read_experts(
    stored: Mapping[str, Array],
    architecture: Architecture,
    dtype: Dtype | None,
    files: Sequence[Path],
    cache: Path | None,
) -> tuple[dict[str, Weight], tuple[MappedWeights, ...]]:
    """Return the weights of all experts that are in MXFP4 one by one, and the memory that they are mapped to.

    Args:
        stored: tensors of a folder by name.
        dtype: of the numbers that the blocks stand for; None: they stay blocks.
        files: those that hold them.
        cache: the folder for what is kept between starts; None keeps nothing.
    Raises: ModelError as `experts_in` does, if a scale is no number, or if what is kept is damaged; OSError.
    """
    experts = experts_in(stored, architecture)
    if dtype is None and cache is not None and experts and (blocks := _kept(experts, files, cache)) is not None:
        return blocks
    with ThreadPoolExecutor(num_usable_cores()) as threads:
        weights = threads.map(
            lambda one: one.block_weight(one.panels()) if dtype is None else one.numbers(dtype), experts
        )
        return {one.name: weight for one, weight in zip(experts, weights, strict=True)}, ()


def _kept(
    experts: Sequence[ExpertBlocks], files: Sequence[Path], cache: Path
) -> tuple[dict[str, Weight], tuple[MappedWeights, ...]] | None:
    """Return the weights out of a file that is made if it is not there; None if nothing can be kept."""
    store, state = KeptWeights(cache / KEPT_FOLDER, source=files[0].parent), state_of(files)
    name = f"{hashlib.sha256(state.encode()).hexdigest()[:32]}-v{_FORMAT}-mxfp4"
    folder = store.find(name)
    if folder is None:
        logger.info("packing experts in MXFP4; this happens once")
        num_bytes = sum(math.prod(one.packed_shape) for one in experts)
        folder = store.make(name, num_bytes, functools.partial(_write, experts, files, state))
    return None if folder is None else _mapped(folder, experts)


def _write(experts: Sequence[ExpertBlocks], files: Sequence[Path], state: str, folder: Path) -> None:
    kinds = {one.name: (np.dtype(np.uint8), one.packed_shape) for one in experts}
    with tensors_written(folder / _NAME, kinds) as (stream, places):

        def put(one: ExpertBlocks) -> None:
            first, data = places[one.name], one.panels().reshape(-1)
            while len(data):  # a disk that becomes full takes a part of it
                written = os.pwrite(stream.fileno(), data.data, first)
                first, data = first + written, data[written:]

        with ThreadPoolExecutor(num_usable_cores()) as threads:
            for _ in threads.map(put, experts):
                pass  # the first error ends it
    if state_of(files) != state:
        raise ModelError(f"{files[0].parent} changed while it was read; start again once it is complete")


def _mapped(folder: Path, experts: Sequence[ExpertBlocks]) -> tuple[dict[str, Weight], tuple[MappedWeights, ...]]:
    try:
        pages = MappedWeights(folder / _NAME)
        return {one.name: one.block_weight(pages.arrays[one.name].reshape(one.packed_shape)) for one in experts}, (
            pages,
        )
    except (OSError, ValueError, LookupError) as error:
        if is_shortage(error):
            raise
        raise ModelError(f"its converted weights are damaged; delete the folder {folder}") from error
