"""Where a process spends its processor time: samples of its program counters, named by the functions of its own code.

The system's profiling timer sends a signal each time the process has used some processor time. A handler of machine
code notes where the interrupted thread was. This needs no rights and no tools, and sees machine code that was made in
this process, which `perf` cannot name. A thread that sleeps uses no time and has no samples; one that spins has some.
"""

from __future__ import annotations

import bisect
import ctypes
import platform
import signal
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from llvmlite import binding, ir

from card.errors import BenchError
from card.kernels.jit import functions, object_code

# Functions that LLVM would put into others: samples could not tell them apart. By name, see `named_code`.
APART = ("attend_part", "wait")
SUFFIX = f"_{'_'.join(APART)}"  # of the names of code that is kept with these by themselves
_PERIOD_S = 1e-3  # of processor time; most systems look only at their ticks, 250 times a second on each core
_MOST_SAMPLES = 1 << 20
_COUNTER_AT = {"x86_64": 168, "aarch64": 440}  # bytes of a ucontext_t of Linux before the program counter
_SYMBOL = struct.Struct("<IBBHQQ")  # of a file of 64 bits: name, kind and binding, visibility, section, value, size
_FUNCTION, _SYMBOL_TABLE = 2, 2


@dataclass(frozen=True, slots=True, order=True)
class Code:
    """A function of machine code in this process."""

    start: int  # its address
    size: int
    name: str


@contextmanager
def named_code() -> Iterator[list[Code]]:
    """Collect the functions of the code that is made in the block, with `APART` by themselves.

    Raises: BenchError if the kernels were made before.
    """
    made_in, init = functions.Function.made_in, object_code.ObjectCode.__init__
    from_data, found, loaded = binding.ObjectFileRef.from_data, list[Code](), list[bytes]()

    def made_apart(self: functions.Function, module: Any) -> Any:
        made = made_in(self, module)
        if self.python.__name__ in APART:
            made.attributes.add("noinline")
        return made

    def listed(self: object_code.ObjectCode, name: str, *given: Any, **more: Any) -> None:
        name += SUFFIX
        init(self, name, *given, **more)
        found.extend(functions_of(loaded[-1], name, self.address))

    def loading(data: bytes) -> Any:
        loaded.append(data)
        return from_data(data)

    with ExitStack() as stack:
        for place, name, new in (
            (functions.Function, "made_in", made_apart),
            (object_code.ObjectCode, "__init__", listed),
            (binding.ObjectFileRef, "from_data", loading),
        ):
            stack.enter_context(mock.patch.object(place, name, new))
        yield found
    if missing := [name for name in APART if not any(code.name.endswith(f".{name}") for code in found)]:
        raise BenchError(f"no code of {', '.join(missing)} was made in time; measure first in a process of its own")


def functions_of(elf: bytes, entry: str, address: int) -> list[Code]:
    """Return the functions of an object file (ELF of 64 bits) whose function ``entry`` lies at an address."""
    [sections_at], (size, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + size * idx) for idx in range(count)]
    symbols: dict[str, tuple[int, int]] = {}
    for _, kind, _, _, at, num_bytes, names, _, _, _ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        names_at = sections[names][4]
        for name, info, _, _, value, length in _SYMBOL.iter_unpack(elf[at : at + num_bytes]):
            if info & 15 == _FUNCTION:
                end = elf.index(b"\0", names_at + name)
                symbols[elf[names_at + name : end].decode()] = value, length
    first = address - symbols[entry][0]
    return [Code(first + value, length, name) for name, (value, length) in symbols.items()]


class Sampler:
    """Notes program counters of all threads while a block runs, and names them afterwards."""

    def __init__(self) -> None:
        """Make the handler. Raises: BenchError on a system that it is not made for."""
        if platform.system() != "Linux" or platform.machine() not in _COUNTER_AT:
            raise BenchError("samples are taken on Linux alone, on x86-64 and ARM processors of 64 bits")
        self._notes = (ctypes.c_uint64 * (1 + _MOST_SAMPLES))()
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(self._handler()), _machine())
        self._engine.finalize_object()
        self._code = self._engine.get_function_address("note")

    def _handler(self) -> str:
        """Return what notes where the interrupted thread was: a count, and behind it the addresses."""
        word, module = ir.IntType(64), ir.Module("samples")
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32), word, word])
        builder = ir.IRBuilder(ir.Function(module, kind, "note").append_basic_block())
        notes = builder.inttoptr(ir.Constant(word, ctypes.addressof(self._notes)), word.as_pointer())
        idx = builder.and_(builder.atomic_rmw("add", notes, word(1), "monotonic"), word(_MOST_SAMPLES - 1))
        context = builder.add(builder.function.args[2], word(_COUNTER_AT[platform.machine()]))
        counter = builder.load(builder.inttoptr(context, word.as_pointer()))
        builder.store(counter, builder.gep(notes, [builder.add(idx, word(1))]))
        builder.ret_void()
        return str(module)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Take samples while the block runs, in place of those of an earlier block."""
        self._notes[0] = 0
        action = _Action(handler=self._code, flags=_SIGINFO | _RESTART)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.sigaction(signal.SIGPROF, ctypes.byref(action), None)
        signal.setitimer(signal.ITIMER_PROF, _PERIOD_S, _PERIOD_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            libc.sigaction(signal.SIGPROF, ctypes.byref(_Action(handler=_IGNORE)), None)  # one may be on its way

    def counts(self, codes: Sequence[Code]) -> Counter[str]:
        """Return how many samples each function has; "" for those outside of these functions."""
        in_order = sorted({*codes, *_waiting_calls()})
        starts = [code.start for code in in_order]
        found = Counter[str]()
        for counter in self._notes[1 : 1 + min(self._notes[0], _MOST_SAMPLES)]:
            idx = bisect.bisect_right(starts, counter) - 1
            code = in_order[idx] if idx >= 0 else None
            found[code.name if code is not None and counter < code.start + code.size else ""] += 1
        return found


_SIGINFO, _RESTART, _IGNORE = 4, 0x10000000, 1  # of Linux's signal.h
_CALL_BYTES = 64  # of the C library's function, which is a system call alone


class _Action(ctypes.Structure):
    """The C library's ``struct sigaction``."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _waiting_calls() -> list[Code]:
    """Return the call by which a waiting thread lets others run, which counts as waiting."""
    address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    return [Code(address or 0, _CALL_BYTES, "sched_yield")]


def _machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(jit=True)
