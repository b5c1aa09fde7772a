"""What the processor can do beyond what torch uses by itself."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_matrix_unit() -> bool:
    """Return whether this process may multiply bytes in the matrix unit (AMX); asks the system for it."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
