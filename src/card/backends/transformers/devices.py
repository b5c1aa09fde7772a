"""Devices of torch."""

from __future__ import annotations

import torch

from card.errors import ModelError


def parse_device(device: str) -> str:
    """Return a device by its name. Raises: ModelError, with the available ones, if it is not available."""
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
        raise ModelError(f"device {device!r} is not available here; allowed: {', '.join(allowed)}")
    return str(parsed)


def computes_bfloat16(device: object) -> bool:
    """Return False for a CPU without bfloat16 instructions.

    On it a bfloat16 pass over several tokens costs almost as much as several passes, so that speculation gains nothing;
    a float32 pass does not.
    """
    if not str(device).startswith("cpu") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def free_bytes(device: str) -> int:
    """Return the free memory of a CUDA device."""
    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def device_name(device: str) -> str:
    """Return the product name of a CUDA device."""
    return str(torch.cuda.get_device_name(device))
