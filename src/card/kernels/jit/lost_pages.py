"""Mapped files that become shorter while they are read: the process reads zeros, and a flag is set.

A page that the file no longer has is a bus error (SIGBUS), which would end the process in the middle of a pass. The
handler is machine code, since it may run in any thread and without Python's lock. It puts zeros in the place of all
that is lost of a file, and sets a flag. Bus errors elsewhere are left to the handler that was there before.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import signal
import sys
import threading

from llvmlite import ir

from card.kernels.jit.object_code import Builder, ObjectCode, Value
from card.kernels.jit.structs import Struct, place
from card.kernels.jit.vectors import INT, VOID, call, compiled, load_int, operation, write

_STATE = "state_of_lost_pages"
_FAULT = 16  # bytes before the address of the fault in what Linux tells a handler, on x86 and ARM of 64 bits
_ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED: in the place of what is there
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_WITH_ADDRESS = 0x4  # SA_SIGINFO of Linux: a handler is told the address
_I32, _I64 = ir.IntType(32), ir.IntType(64)


class _State(Struct):
    """State of the handler."""

    handler: int = place("address of its code")
    files: int = place("a `_File` for each watched file; one without addresses is the end")
    former: int = place("address of the former action")
    page: int = place("bytes of a page")


class _File(Struct):
    """A file that is watched."""

    first: int = place("address of its first byte")
    end: int = place("address behind its last one")
    flag: int = place("address of what becomes 1 when a part is lost")


class _Action(ctypes.Structure):
    """An action at a signal, as the C libraries of Linux have it on x86 and ARM of 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_int64),
        ("mask", ctypes.c_int64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_int64),
    )


class LostPages:
    """The files that are watched in this process."""

    def __init__(self) -> None:
        """Watch none. Raises: OSError if the system takes no handler."""
        self._lock = threading.Lock()
        self._flags: dict[tuple[int, int], ctypes.c_int64] = {}  # by first address and end
        self._former = _Action()
        self._tables = [(ctypes.c_int64 * _File.size)()] * 2  # the present one, and one that a handler may still read
        addresses = (ctypes.addressof(one) for one in (self._tables[0], self._former))
        self._state = (ctypes.c_int64 * _State.size)(0, *addresses, mmap.PAGESIZE)
        self._code = ObjectCode("lost_pages", _install)
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._code.address)(ctypes.addressof(self._state))
        action = _Action(handler=self._state[_State.handler], flags=_WITH_ADDRESS)
        change = ctypes.CDLL(None, use_errno=True).sigaction
        if change(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(self._former)):
            raise OSError(ctypes.get_errno(), "no handler for lost pages of files can be set")

    def watch(self, first: int, size: int) -> ctypes.c_int64:
        """Watch a mapped file; return a flag that becomes 1 when a part of it was lost."""
        flag = ctypes.c_int64()
        with self._lock:
            self._flags[first, first + size] = flag
            self._tell()
        return flag

    def forget(self, first: int, size: int) -> None:
        """Watch a file no longer: it may be unmapped now."""
        with self._lock:
            del self._flags[first, first + size]
            self._tell()

    def _tell(self) -> None:
        table = (ctypes.c_int64 * (_File.size * (len(self._flags) + 1)))()
        for i, ((first, end), flag) in enumerate(self._flags.items()):
            table[_File.size * i : _File.size * (i + 1)] = [first, end, ctypes.addressof(flag)]
        self._tables = [table, self._tables[0]]
        self._state[_State.files] = ctypes.addressof(table)


@functools.cache
def lost_pages() -> LostPages | None:
    """Return the watched files; None where bus errors differ from those of Linux."""
    return LostPages() if sys.platform == "linux" else None


@operation(INT, INT)
def _state(builder: Builder, place: Value) -> Value:
    """Return what the state holds at a place."""
    address = builder.load(builder.module.globals[_STATE], typ=_I64)
    at = builder.add(address, builder.mul(place, ir.Constant(_I64, 8)))
    return builder.load(builder.inttoptr(at, ir.PointerType()), typ=_I64)


@operation(VOID, INT)
def _raise_flag(builder: Builder, address: Value) -> None:
    write(builder, ir.Constant(_I64, 1), address)


@operation(VOID, INT, INT)
def _map_zeros(builder: Builder, first: Value, size: Value) -> None:
    numbers = (ir.Constant(_I32, number) for number in (_READ_WRITE, _ZEROS, -1))
    call(builder, "mmap", _I64, first, size, *numbers, ir.Constant(_I64, 0))


@operation(VOID, INT)
def _act_as_before(builder: Builder, former: Value) -> None:
    call(builder, "sigaction", _I32, ir.Constant(_I32, int(signal.SIGBUS)), former, ir.Constant(_I64, 0))


@compiled
def _on_bus_error(number: int, fault: int, context: int) -> None:
    """Put zeros in the place of what a file has lost; at other addresses what was done before happens at once."""
    address = load_int(fault + _FAULT)
    file = _state(_State.files)
    while load_int(file + 8 * _File.first):
        end = load_int(file + 8 * _File.end)
        if address < load_int(file + 8 * _File.first) or address >= end:
            file += 8 * _File.size
            continue
        page = address - address % _state(_State.page)
        _raise_flag(load_int(file + 8 * _File.flag))
        _map_zeros(page, end - page)
        return
    _act_as_before(_state(_State.former))


def _install(builder: Builder, state: Value) -> None:
    """Write what remembers the state, and puts the handler's address into it."""
    place = ir.GlobalVariable(builder.module, _I64, _STATE)
    place.linkage, place.initializer = "internal", ir.Constant(_I64, 0)
    builder.store(state, place)
    write(builder, builder.ptrtoint(_on_bus_error.made_in(builder.module), _I64), state)  # type: ignore[attr-defined]
