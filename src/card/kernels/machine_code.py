"""The machine code of `card.kernels.jit`: whether this process can make it, its modules, its name on disk."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from card.machine.processor import kernel_kind


@functools.cache
def machine_code(module: str) -> Any:
    """Return a module of `card.kernels.jit`: compiled at its first use on a machine, and kept for later ones."""
    return import_module(f"card.kernels.jit.{module}")


def has_machine_code() -> bool:
    """Return whether this process can make machine code."""
    return find_spec("llvmlite") is not None and kernel_kind() is not None


def kernels_identity() -> str:
    """Return a name that only this kind of kernels, made from these sources, has.

    Returns: empty without machine code, where torch multiplies.
    """
    return str(machine_code("object_code").kept_name()) if has_machine_code() else ""
