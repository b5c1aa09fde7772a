"""Run a program and its tests in a process that can open no file and no connection. Run as a script by `programs`.

The process reads [program, tests] as JSON from its input and writes a character for each test to its output: 1 if it
passed, 0 if not. Before the program runs, the kernel is told which system calls remain (seccomp(2)): memory, handlers
of signals, the clock, and what is open already, that is input and output. All others fail with EACCES: no file, no
socket, no process, no signal to others. Modules that programs often import are loaded before. Limits of time, memory
and output hold besides. A program may write a wrong result for itself, and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
import sys

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CPU_SECONDS = 5  # of all tests together
_MEMORY_BYTES = 1 << 30  # of addresses
_OUTPUT_BYTES = 1 << 12  # that it may write: a character for each test

# Loaded before the fence closes; the rest of the standard library cannot be imported.
_MODULES = (
    *("_strptime", "array", "bisect", "calendar", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal"),
    *("enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "queue", "random"),
    *("re", "statistics", "string", "textwrap", "time", "typing", "unicodedata"),
)

# Of each kind of processor: its number in <linux/audit.h>, and the system calls that remain, in this order: read,
# write, close, fstat, lseek, mmap, mprotect, munmap, mremap, brk, madvise, rt_sigaction, rt_sigprocmask, rt_sigreturn,
# sigaltstack, restart_syscall, futex, sched_yield, clock_gettime, getrandom, exit, exit_group.
_CALLS = {
    "x86_64": (0xC000003E, (0, 1, 3, 5, 8, 9, 10, 11, 25, 12, 28, 13, 14, 15, 131, 219, 202, 24, 228, 318, 60, 231)),
    "aarch64": (
        0xC00000B7,
        (63, 64, 57, 80, 62, 222, 226, 215, 216, 214, 233, 134, 135, 139, 132, 128, 98, 124, 113, 278, 93, 94),
    ),
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of the filter: BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000 | 13, 0x80000000  # 13 is EACCES
_NUMBER, _KIND = 0, 4  # offsets in struct seccomp_data
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl(2)


def _filter(kind: int, calls: tuple[int, ...]) -> bytes:
    """Return the instructions that allow these calls: of 8 bytes, code, jumps if true and if false, and a number."""
    lines = [(_LOAD, 0, 0, _KIND), (_EQUAL, 1, 0, kind), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    lines += [(_EQUAL, len(calls) - idx, 0, call) for idx, call in enumerate(calls)]
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)])


def close_fence() -> bool:
    """Take from this process all but the calls above, for good; return whether the kernel did."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return False
    code = _filter(*_CALLS[platform.machine()])
    held = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(held)))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return not prctl(_SET_SECCOMP, _FILTER, ctypes.addressof(program), 0, 0)


class _Nowhere:
    """Takes what the program prints."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def main() -> int:
    """Run the tests of the input. Returns the exit status."""
    if resource is None:
        return 1
    program, tests = json.load(sys.stdin)
    for name in _MODULES:
        __import__(name)
    sys.stdout = sys.stderr = _Nowhere()
    for kind, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if not close_fence():
        return 1
    names = {"__name__": "answer"}
    _passes(program, names)
    for test in tests:
        os.write(1, b"1" if _passes(test, names) else b"0")
    return 0


def _passes(source: str, names: dict[str, str]) -> bool:
    try:
        exec(compile(source, "answer", "exec"), names)
    except BaseException:  # whatever the program raises, exits included
        return False
    return True


if __name__ == "__main__":
    os._exit(main())
