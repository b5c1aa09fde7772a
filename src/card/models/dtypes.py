"""Data types and devices of models, as a user names them and as the processor allows."""

from __future__ import annotations

from card.config import INT8
from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.kernels.number_types import dtype_name
from card.models.by_transformers import has_transformers, torch_module
from card.models.files.gguf.source import GgufSource
from card.models.files.sources import Source, explained
from card.models.warn_once import warn_once

CPU, AUTO = "cpu", "auto"
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(dtype: object) -> str:
    """Return the name of a data type, given by it or by torch's; "auto" for weights as they are stored.

    Raises: ModelError for another one.
    """
    if isinstance(dtype, str) and dtype in (AUTO, INT8):
        return AUTO  # runners make integers of the weights as they are stored
    name = _SHORT_NAMES.get(dtype_name(dtype), dtype_name(dtype))
    if name not in _DTYPES:
        raise ModelError(
            f"unknown dtype {str(dtype)!r}; allowed: {AUTO}, {INT8}, {', '.join((*_DTYPES, *_SHORT_NAMES))}"
        )
    return name


def parse_device(device: object) -> str:
    """Return a device by its name. Raises: ModelError, with those that are here, if it is not available."""
    name = str(device)
    if name == CPU:
        return name
    if not has_transformers():
        raise ModelError(f"device {name!r} is not available here; allowed: {CPU}")
    parsed: str = torch_module("transformers.devices", f"device {name}").parse_device(name)
    return parsed


def dtype_for(source: Source, dtype: object, device: str) -> object:
    """Return what a model is to compute in: in integers, if a quantised file cannot run as it is on our exact pass."""
    if dtype != AUTO or device != CPU or source.gguf is None:
        return dtype
    with explained(source, "the weights of {} cannot be read"):
        is_quantized, why = source.gguf.is_quantized, source.gguf.why_not_blocks
    if not is_quantized or why_not_int8() is not None:
        return dtype
    warn_once(
        f"{source.name} cannot run with its own blocks, as {why}: it runs in 8-bit integers made of them (--dtype "
        "bfloat16 or float32 for others)"
    )
    return INT8


def runs_as_blocks(gguf: GgufSource, dtype: object, device: str) -> bool:
    """Return whether a file runs with its own numbers, by products of integers."""
    return dtype == AUTO and device == CPU and gguf.why_not_blocks is None and why_not_int8() is None


def has_own_pass(dtype: str, device: str) -> bool:
    """Return whether weights of a dtype can be run by our own pass on a device."""
    return device == CPU and dtype != "float64" and why_not_int8() is None
