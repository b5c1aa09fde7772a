"""Devices that torch knows."""

from __future__ import annotations

import torch

from card.errors import ModelError


def parse_device(device: str) -> str:
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
        raise ModelError(f"device {device!r} is not available here; allowed: {', '.join(allowed)}")
    return str(parsed)
