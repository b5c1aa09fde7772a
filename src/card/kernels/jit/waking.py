"""Threads that sleep until a word of memory changes, and the one call that wakes those who are meant.

On Linux this is the futex: the kernel wakes each sleeper by itself, and none waits for another one's lock. A sleeper
belongs to one of 32 groups, and only the groups that a call names wake. Elsewhere it is a condition variable of the C
library, which wakes all. Neither needs Python's lock.
"""

from __future__ import annotations

import platform
import sys

from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.vectors import INT, VOID, call, compiled, look, operation

# Places in the words of a wake: what sleepers look at, how often they were woken, then a mutex and a condition.
WORD, NUM_CALLS, _MUTEX, _CONDITION, WAKE_SIZE = 0, 8, 16, 32, 48
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # the number of the system call
_WAIT, _WAKE, _ALL = 137, 138, (1 << 31) - 1  # FUTEX_WAIT_BITSET and FUTEX_WAKE_BITSET, private; how many
NUM_GROUPS = 32  # of sleepers: bits of the kernel's mask


def has_futex() -> bool:
    """Return whether sleepers sleep in the kernel's own way."""
    return sys.platform == "linux" and _FUTEX is not None


@operation(VOID, INT)
def prepare_wake(builder: Builder, wake: Value) -> None:
    """Make the mutex and the condition at their places, where they are needed."""
    if not has_futex():
        _posix(builder, "pthread_mutex_init", _at(builder, wake, _MUTEX), ir.Constant(_I64, 0))
        _posix(builder, "pthread_cond_init", _at(builder, wake, _CONDITION), ir.Constant(_I64, 0))


@operation(VOID, INT, INT, INT)
def _sleep(builder: Builder, wake: Value, seen: Value, group: Value) -> None:
    """Sleep while the word is this one, or shorter."""
    if has_futex():
        _futex(builder, wake, _WAIT, builder.trunc(seen, _I32), builder.shl(ir.Constant(_I64, 1), group))
    else:
        _posix(builder, "pthread_cond_wait", _at(builder, wake, _CONDITION), _at(builder, wake, _MUTEX))


@operation(VOID, INT)
def _enter(builder: Builder, wake: Value) -> None:
    """Keep the word as it is until `_leave`, where sleepers need that."""
    if not has_futex():
        _posix(builder, "pthread_mutex_lock", _at(builder, wake, _MUTEX))


@operation(VOID, INT)
def _leave(builder: Builder, wake: Value) -> None:
    """Let the word be changed again."""
    if not has_futex():
        _posix(builder, "pthread_mutex_unlock", _at(builder, wake, _MUTEX))


@operation(VOID, INT, INT)
def _change(builder: Builder, wake: Value, word: Value) -> None:
    """Change the word: who sees it sees all that was stored before."""
    builder.atomic_rmw("xchg", builder.inttoptr(wake, ir.PointerType()), word, "seq_cst")


@operation(VOID, INT, INT)
def _wake(builder: Builder, wake: Value, num_groups: Value) -> None:
    """Wake those of the first groups that sleep, and count the call."""
    place = builder.inttoptr(_at(builder, wake, NUM_CALLS), ir.PointerType())
    builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "seq_cst")
    if has_futex():
        end = builder.shl(ir.Constant(_I64, 1), num_groups)
        _futex(builder, wake, _WAKE, ir.Constant(_I32, _ALL), builder.sub(end, ir.Constant(_I64, 1)))
    else:
        _posix(builder, "pthread_cond_broadcast", _at(builder, wake, _CONDITION))


@compiled
def sleep_until_changed(wake: int, seen: int, group: int) -> int:
    """Sleep until a change that is meant for this group, of `NUM_GROUPS`; return the word."""
    _enter(wake)
    while look(wake) == seen:
        _sleep(wake, seen, group)
    _leave(wake)
    return look(wake)


@compiled
def change_and_wake(wake: int, word: int, num_groups: int) -> None:
    """Change the word, and wake those of the first groups who sleep until then; where there is no futex, all."""
    _enter(wake)
    _change(wake, word)
    _leave(wake)
    _wake(wake, num_groups)


def _at(builder: Builder, wake: Value, place: int) -> Value:
    return builder.add(wake, ir.Constant(_I64, 8 * place))


def _posix(builder: Builder, name: str, *values: Value) -> None:
    call(builder, name, _I32, *values)


def _futex(builder: Builder, word: Value, what: int, value: Value, groups: Value) -> None:
    number, kind, nothing = (ir.Constant(_I64, one) for one in (_FUTEX, what, 0))
    call(builder, "syscall", _I64, number, word, kind, builder.zext(value, _I64), nothing, nothing, groups)
