"""Data types and devices of models, as a user names them and as the processor allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from card.config import INT8
from card.errors import ModelError
from card.kernels.int8_linear import why_not_int8
from card.machine.processor import computes_bfloat16
from card.models.files.gguf.source import GgufSource
from card.models.files.sources import Source, explained
from card.models.own.decoder_model import mark_int8
from card.models.own.reasons import is_exact
from card.models.warn_once import warn_once

if TYPE_CHECKING:
    from card.models.own.decoder_model import LoadedModel

_NO_BFLOAT16 = "this processor has no bfloat16 instructions"
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def parse_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return a data type by its name; "auto" for weights as they are stored. Raises: ModelError for other names."""
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    if dtype == INT8:
        return "auto"  # runners make integers of the weights as they are stored
    if dtype not in _DTYPES:
        raise ModelError(f"unknown dtype {str(dtype)!r}; allowed: auto, {INT8}, {', '.join(_DTYPES)}")
    return _DTYPES[str(dtype)]


def parse_device(device: str | torch.device) -> torch.device:
    """Return a device by its name. Raises: ModelError, with those that are here, if it is not available."""
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["cpu", *(f"cuda:{idx}" for idx in range(num_cuda))] + ["mps"] * torch.backends.mps.is_available()
    try:
        parsed = torch.device(device)
    except RuntimeError:
        parsed = None
    is_there = parsed is not None and (
        (parsed.type == "cuda" and (parsed.index or 0) < num_cuda) or (parsed.type in allowed and not parsed.index)
    )
    if parsed is None or not is_there:
        raise ModelError(f"device {str(device)!r} is not available here; allowed: {', '.join(allowed)}")
    return parsed


def dtype_for(source: Source, dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """Return what a model is to compute in: in integers, if a quantised file cannot run as it is on our exact pass."""
    if dtype != "auto" or device.type != "cpu" or source.gguf is None:
        return dtype
    with explained(source, "the weights of {} cannot be read"):
        is_quantized = source.gguf.is_quantized
    if not is_quantized or why_not_int8() is not None:
        return dtype
    warn_once(
        f"{source.name} cannot run with its own blocks: it runs in 8-bit integers made of them (--dtype bfloat16 or "
        "float32 for others)"
    )
    return INT8


def runs_as_blocks(gguf: GgufSource, dtype: str | torch.dtype, device: torch.device) -> bool:
    """Return whether a file runs with its own numbers, by products of integers."""
    return dtype == "auto" and device.type == "cpu" and gguf.can_run_blocks and why_not_int8() is None


def has_own_pass(dtype: str | torch.dtype, device: torch.device) -> bool:
    """Return whether weights of a dtype can be run without transformers' modules on a device."""
    return device.type != "cpu" or (dtype != torch.float64 and why_not_int8() is None)


def fit_to_processor(model: LoadedModel, dtype: str | torch.dtype) -> None:
    """Let a loaded model compute in integers if asked to; "auto" is float32 where torch would be slow in 16 bits."""
    if dtype == INT8:
        mark_int8(model)
    elif dtype != "auto" or model.dtype not in (torch.bfloat16, torch.float16) or computes_bfloat16(model.device):
        return
    elif not is_exact(model):
        warn_once(
            f"{_NO_BFLOAT16}: weights of 16 bits are widened to float32 (--dtype bfloat16 keeps them, --dtype int8 is "
            "faster)"
        )
        model.float()
