"""Functions that are written as LLVM's instructions, compiled once on a machine and kept as object code.

What `card.kernels.jit.tiles` writes is in the order that it is to run in, so LLVM's passes over instructions are left
out: they were measured to gain nothing and to take more than half of the time. Functions of Python need them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from card.machine.file_locks import alone_at, is_held
from card.machine.folders import cache_folder, is_safe_folder, make_private, read_kept, write_kept
from card.machine.processor import kernel_kind, llvm_target
from card.machine.uninterrupted import uninterrupted

Builder = Any  # of llvmlite, which has no types
Value = Any
_DIGEST_BYTES = 32  # of the code, before it: a file that was damaged must not run


class ObjectCode:
    """A function of one integer in this process."""

    def __init__(self, name: str, write: Callable[[Builder, Value], None], *, is_optimized: bool = False) -> None:
        """Take what an earlier process kept, or compile now.

        Args:
            name: of the function; no other one of these sources may have it.
            write: writes its instructions: (builder, its argument).
            is_optimized: LLVM rearranges them.
        """
        file = _file_of(name)
        code = _kept(file)
        if code is None:
            with _alone_at(file):
                code = _kept(file) or uninterrupted(lambda: _compiled(name, write, is_optimized=is_optimized))
                _keep(file, code)
        self._engine, self.address = uninterrupted(lambda: _loaded(name, code))  # the engine owns the code


def is_made_elsewhere(name: str) -> bool:
    """Return whether another process compiles a function at this moment, so that this one may do something else."""
    file = _file_of(name)
    if file is not None:
        with contextlib.suppress(OSError):
            return is_held(file.with_suffix(".lock"))
    return False


def is_missing(name: str) -> bool:
    """Return whether a function is to be compiled, and can be kept."""
    file = _file_of(name)
    return file is not None and not file.exists()


def kept_folder() -> Path | None:
    """Return where the code of these sources and of this kind of kernels is kept.

    Returns: None if no folder can be trusted; each process then compiles for itself.
    """
    folder = cache_folder(None) / "code" / kept_name()
    return folder if is_safe_folder(folder, "machine code") else None


def kept_name() -> str:
    """Return a name that only these sources and this kind of kernels have. Raises: OSError."""
    return f"{_source_digest()}-{kernel_kind()}"


def _file_of(name: str) -> Path | None:
    """Return where the code of a function is kept; None: nowhere."""
    try:
        folder = kept_folder()
    except (OSError, RuntimeError):  # the sources cannot be read, or there is no home
        return None
    return None if folder is None else folder / f"{name}-{_machine_digest()}.o"


@functools.cache
def _source_digest() -> str:
    here = Path(__file__).parent
    sources = sorted((*here.glob("*.py"), *(here.parent / "formats").glob("*.py")))  # whose shapes are compiled
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _target() -> tuple[str, str, str]:
    """Return triple, processor and features of what code is made for."""
    triple, *host = _host()
    return triple, *(llvm_target() or host)


@functools.cache
def _host() -> tuple[str, str, str]:
    """Return this machine's triple, processor and its features."""
    asked = binding.get_process_triple, binding.get_host_cpu_name, lambda: binding.get_host_cpu_features().flatten()
    return uninterrupted(lambda: tuple(ask() for ask in asked))


def _machine_digest() -> str:
    return hashlib.sha256(repr((*_target(), binding.llvm_version_info)).encode()).hexdigest()[:16]


def _machine() -> Any:
    """Return LLVM's machine for the target."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple, processor, features = _target()
    target = binding.Target.from_triple(triple)
    relocations = "static" if target.name.startswith("x86") else "default"
    return target.create_target_machine(
        cpu=processor, features=features, opt=3, reloc=relocations, codemodel="jitdefault", jit=True
    )


def _optimize(module: Any, machine: Any) -> None:
    """Let LLVM make registers of variables and put functions into each other; vectors are written as such already."""
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


@contextlib.contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Look for garbage at the end of a block alone: to look again and again takes a third of writing instructions.

    They refer to each other: 35 MB that would stay, in pieces.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()


def _compiled(name: str, write: Callable[[Builder, Value], None], *, is_optimized: bool) -> bytes:
    with _garbage_left_alone():
        machine = _machine()
        # In LLVM's common context the types and constants of a module would stay for as long as the process.
        module = binding.parse_assembly(_instructions(name, write, machine), binding.create_context())
        if is_optimized:
            _optimize(module, machine)
        return bytes(machine.emit_object(module))


def _loaded(name: str, code: bytes) -> tuple[Any, int]:
    """Return LLVM's engine with a function, and the function's address."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, int(engine.get_function_address(name))


def _instructions(name: str, write: Callable[[Builder, Value], None], machine: Any) -> str:
    module = ir.Module(name)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), name)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    write(builder, function.args[0])
    builder.ret_void()
    return str(module)


def _kept(file: Path | None) -> bytes | None:
    """Return code that is kept as it was written; None if there is none."""
    if file is not None:
        with contextlib.suppress(OSError):
            digest, code = (content := read_kept(file))[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if _digest(file, code) == digest:
                return code
    return None


@contextlib.contextmanager
def _alone_at(file: Path | None) -> Iterator[None]:
    """Wait while another process makes a file: target and drafter begin at once, and need the same code."""
    with contextlib.ExitStack() as stack:
        if file is not None:
            with contextlib.suppress(OSError):  # then both make it
                make_private(file.parent)
                stack.enter_context(alone_at(file.with_suffix(".lock")))
        yield


def _keep(file: Path | None, code: bytes) -> None:
    """Keep code for later processes, whole or not at all; on a full disk they compile it again."""
    if file is not None:
        with contextlib.suppress(OSError):
            write_kept(file, _digest(file, code) + code)


def _digest(file: Path, code: bytes) -> bytes:
    """Return the digest of code and its name, so that code of another function does not match."""
    return hashlib.sha256(file.name.encode() + b"\0" + code).digest()
