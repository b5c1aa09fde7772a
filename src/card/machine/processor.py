"""Instructions of the processor, and the kernels of ours that are made for them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import struct
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from card.config import KERNEL_KINDS, KERNELS_VARIABLE
from card.errors import SettingsError, named
from card.machine.sysctl import system_number
from card.machine.uninterrupted import uninterrupted

_VECTORS = ("avx2", "fma", "f16c")
_NEEDS: Mapping[str, tuple[str, ...]] = {  # features, under LLVM's names
    "amx": (*_VECTORS, "avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-tile", "amx-int8"),
    "avx512-vnni": (*_VECTORS, "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avx-vnni": (*_VECTORS, "avxvnni"),
    "avx2": _VECTORS,
    "arm-i8mm": ("dotprod", "i8mm"),
    "arm-dotprod": ("dotprod",),
}
INTEGER_PROCESSORS = "an x86 processor with AVX2, or an ARM processor with dot products"
_ARM_BITS = {"dotprod": (16, 20), "i8mm": (26, 13)}  # entry of the auxiliary vector and bit in it (Linux's hwcap.h)
_ARM_NAMES = {"dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}  # macOS's
# The call by which Linux lets a process use tiles of AMX (arch/x86/include/uapi/asm/prctl.h), on x86-64.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
AUXILIARY_VECTOR = Path("/proc/self/auxv")


def processor_name() -> str:
    """Return the processor's model, or its kind where the system does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


@functools.cache
def has_matrix_unit() -> bool:
    """Return whether this process may multiply bytes in the matrix unit (AMX); asks the system for it."""
    if platform.system() != "Linux" or not {"amx-tile", "amx-int8"} <= _features():
        return False
    system = ctypes.CDLL(None).syscall
    return bool(system(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST_PERMISSION), ctypes.c_long(_TILE_DATA)) == 0)


@functools.cache
def possible_kernels() -> tuple[str, ...]:
    """Return the kinds of kernels that this processor runs, the fastest first; needs llvmlite."""
    features = _features()
    return tuple(
        kind for kind in KERNEL_KINDS if features.issuperset(_NEEDS[kind]) and (kind != "amx" or has_matrix_unit())
    )


def is_arm() -> bool:
    """Return whether this is an ARM processor of 64 bits."""
    return platform.machine().lower() in ("aarch64", "arm64")


def _features() -> frozenset[str]:
    """Return the processor's features, under LLVM's names."""
    if is_arm():
        return _arm_features()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    binding: Any = import_module("llvmlite.binding")
    features: Mapping[str, bool] = uninterrupted(binding.get_host_cpu_features)
    return frozenset(name for name, is_there in features.items() if is_there)


def _arm_features() -> frozenset[str]:
    """Return what the system says of an ARM processor; LLVM's own list is empty on some systems."""
    if platform.system() == "Darwin":
        return frozenset(name for name, of_system in _ARM_NAMES.items() if system_number(of_system))
    try:
        raw = AUXILIARY_VECTOR.read_bytes()
    except OSError:
        return frozenset()
    numbers = struct.unpack(f"{len(raw) // 8}Q", raw[: len(raw) // 8 * 8])
    entries = dict(zip(numbers[::2], numbers[1::2], strict=False))
    return frozenset(name for name, (entry, bit) in _ARM_BITS.items() if entries.get(entry, 0) >> bit & 1)


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
        allowed = ", ".join(possible) or f"none: int8 needs {INTEGER_PROCESSORS}"
        raise SettingsError(
            f"{named('kernels')} must be of a kind that this processor runs, got {wanted!r}; allowed: {allowed}"
        )
    return wanted


def llvm_target() -> tuple[str, str] | None:
    """Return the processor and the features that LLVM is to make code for; None for those of this machine.

    A kind that is named gets no instruction beyond its own: what it measures holds for a processor that has no more.
    """
    if is_arm():
        return "generic", ",".join(f"+{feature}" for feature in _NEEDS[kernel_kind() or "arm-dotprod"])
    kind = kernel_kind() if os.environ.get(KERNELS_VARIABLE) else None
    if kind == "avx2":
        return "x86-64-v3", ""
    return ("x86-64-v3", "+avxvnni") if kind == "avx-vnni" else None
