"""Functions that are written as LLVM's instructions, compiled once on a machine and kept as object code.

They are made without numba and without LLVM's passes over instructions: what `card.kernels.jit.tiles` writes is in the
order that it is to run in, so those passes were measured to gain nothing and to take more than half of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from llvmlite import binding, ir
from numba import config
from numba.core.registry import cpu_target

from card.kernels.jit.vectors import Builder, Value

_DIGEST_BYTES = 32  # of the code, before it: a file that was damaged must not run


class ObjectCode:
    """A function of one integer in this process."""

    def __init__(self, name: str, write: Callable[[Builder, Value], None]) -> None:
        """Take what an earlier process kept, or compile now.

        Args:
            name: of the function; no other one of these sources may have it.
            write: writes its instructions: (builder, its argument).
        """
        of = cpu_target.target_context.codegen().magic_tuple()  # triple, processor and features, as numba has them
        machine, about = _machine(*of), repr((*of, binding.llvm_version_info))
        folder = cast(Any, config).CACHE_DIR  # where numba keeps its own
        file = Path(folder) / f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.o"
        code = _kept(file)
        if code is None:
            code = machine.emit_object(binding.parse_assembly(_instructions(name, write, machine)))
            _keep(file, code)
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)  # which owns the code
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(name)


def _machine(triple: str, processor: str, features: str) -> Any:
    """Return the target machine that numba makes for the same processor."""
    target = binding.Target.from_triple(triple)
    relocations = "static" if target.name.startswith("x86") else "default"
    return target.create_target_machine(
        cpu=processor, features=features, opt=3, reloc=relocations, codemodel="jitdefault", jit=True
    )


def _instructions(name: str, write: Callable[[Builder, Value], None], machine: Any) -> str:
    module = ir.Module(name)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), name)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    write(builder, function.args[0])
    builder.ret_void()
    return str(module)


def _kept(file: Path) -> bytes | None:
    """Return code that is kept as it was written; None if there is none."""
    with contextlib.suppress(OSError):
        digest, code = (content := file.read_bytes())[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
    return None


def _keep(file: Path, code: bytes) -> None:
    """Keep code for later processes, whole or not at all; on a full disk they compile it again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(hashlib.sha256(code).digest() + code)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
