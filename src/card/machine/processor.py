"""Instructions of the processor that torch does not use by itself, and the kernels of ours that are made for them."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from card.config import KERNEL_KINDS, KERNELS_VARIABLE
from card.errors import SettingsError

_VECTORS = ("avx2", "fma", "f16c")
_NEEDS: Mapping[str, tuple[str, ...]] = {  # features, under LLVM's names
    "amx": (*_VECTORS, "avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-tile", "amx-int8"),
    "avx512-vnni": (*_VECTORS, "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avx-vnni": (*_VECTORS, "avxvnni"),
    "avx2": _VECTORS,
}


def processor_name() -> str:
    """Return the processor's model, or its kind where the system does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def computes_bfloat16(device: str | torch.device) -> bool:
    """Return False for a CPU that is known to have no bfloat16 instructions.

    There a bfloat16 pass over several tokens costs almost as much as several passes, so that candidates cost what they
    save; in float32 they do not.
    """
    if not str(device).startswith("cpu") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def has_matrix_unit() -> bool:
    """Return whether this process may multiply bytes in the matrix unit (AMX); asks the system for it."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


@functools.cache
def possible_kernels() -> tuple[str, ...]:
    """Return the kinds of kernels that this processor runs, the fastest first; needs llvmlite."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ()
    binding: Any = import_module("llvmlite.binding")
    features: Mapping[str, bool] = binding.get_host_cpu_features()
    return tuple(
        kind
        for kind in KERNEL_KINDS
        if all(features.get(need) for need in _NEEDS[kind]) and (kind != "amx" or has_matrix_unit())
    )


@functools.cache
def kernel_kind() -> str | None:
    """Return the kind of kernels that this process makes: the one that `KERNELS_VARIABLE` names, or the fastest.

    Returns: None if this processor runs none.
    Raises: SettingsError if the one that is named is not known or does not run here.
    """
    possible, wanted = possible_kernels(), os.environ.get(KERNELS_VARIABLE)
    if not wanted:
        return possible[0] if possible else None
    if wanted not in possible:
        allowed = ", ".join(possible) or "none: int8 needs an x86 processor with AVX2"
        raise SettingsError(f"kernels must be of a kind that this processor runs, got {wanted!r}; allowed: {allowed}")
    return wanted


def llvm_target() -> tuple[str, str] | None:
    """Return the processor and the features that LLVM is to make code for; None for those of this machine.

    A kind that is named gets no instruction beyond its own: what it measures holds for a processor that has no more.
    """
    kind = kernel_kind() if os.environ.get(KERNELS_VARIABLE) else None
    if kind == "avx2":
        return "x86-64-v3", ""
    return ("x86-64-v3", "+avxvnni") if kind == "avx-vnni" else None
