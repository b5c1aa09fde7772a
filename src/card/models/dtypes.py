"""Data types and devices of models, as a user names them and as the processor allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from card.config import INT8
from card.errors import ModelError
from card.kernels.float_linear import FLOAT_PRODUCTS
from card.kernels.int8_linear import why_not_int8
from card.machine.processor import computes_bfloat16
from card.models.decoder_model import architecture_of, mark_exact, mark_int8
from card.models.facts import context_limit
from card.models.fused import reason_not_fusable
from card.models.gguf.source import GgufSource
from card.models.inner_text import TURNS_BY_AXES
from card.models.said_once import say_once
from card.models.sources import Source, explained

if TYPE_CHECKING:
    from card.models.decoder_model import LoadedModel

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
    """Return what a model is to compute in: in integers where a quantised file would be unpacked to slow numbers."""
    if dtype != "auto" or computes_bfloat16(device) or source.gguf is None:
        return dtype
    with explained(source, "the weights of {} cannot be read"):
        is_quantized = source.gguf.is_quantized
    if not is_quantized or why_not_int8() is not None:
        return dtype
    say_once(f"{_NO_BFLOAT16}: quantised files run in 8-bit integers (--dtype bfloat16 or float32 for others)")
    return INT8


def runs_as_blocks(gguf: GgufSource, dtype: str | torch.dtype, device: torch.device) -> bool:
    """Return whether a file runs with its own numbers, by products of integers."""
    return dtype == "auto" and device.type == "cpu" and why_not_int8() is None and gguf.can_run_blocks


def fit_to_processor(model: LoadedModel, dtype: str | torch.dtype) -> None:
    """Let a loaded model compute by our machine code where it can, else "auto" in float32 where 16 bits are slow."""
    if dtype == INT8:
        mark_int8(model)
    elif _runs_exactly(model):
        mark_exact(model)
    elif dtype == "auto" and model.dtype in (torch.bfloat16, torch.float16) and not computes_bfloat16(model.device):
        say_once(
            f"{_NO_BFLOAT16}: weights of 16 bits are widened to float32 (--dtype bfloat16 keeps them, --dtype int8 is "
            "faster)"
        )
        model.float()


def _runs_exactly(model: LoadedModel) -> bool:
    """Return whether our machine code can run a model with its weights as they are stored."""
    if model.device.type != "cpu" or model.dtype not in FLOAT_PRODUCTS or architecture_of(model) is None:
        return False
    if getattr(model.config, TURNS_BY_AXES, False):
        return False
    return reason_not_fusable(model, context_limit(model)) is None and why_not_int8() is None
