"""What this machine can do at most: multiply-adds of bytes and of floats, and bytes read from memory, in a second.

Loops of nothing but the instructions that our kernels are made of, on all threads at once, by the processor's time: so
other work on the machine counts for little.
"""

from __future__ import annotations

import ctypes
import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

from card.kernels.jit.byte_tiles import FORMAT
from card.kernels.jit.object_code import Builder, ObjectCode, Value
from card.kernels.jit.products import product_of
from card.kernels.jit.vectors import FLOATS, INT, LANES, call, fma_of, loop, moved, read, splat, write
from card.machine.processor import kernel_kind

_SECONDS, _NUM_RUNS = 0.05, 3  # of each loop, of the processor; the fastest run counts
_MANY_SUMS, _FEW_SUMS = 12, 6  # made at once: enough to hide the units' delay, if a sum takes one register or more
_GROUP_BYTES, _TILE_ROWS, _TILES = 64, 16, 4  # of the matrix unit: bytes of a row, rows and sums' tiles
_VECTOR_BYTES, _READ_AT_ONCE = 4 * LANES, 8
_READ_BYTES = 1 << 30  # of memory, all threads together: more than caches hold

Body = Callable[[Builder, Value, list[Value]], list[Value]]  # (builder, an address, values) to their new ones
Setup = Callable[
    [Builder, Value], tuple[list[Value], Body]
]  # (builder, address of numbers) to the first ones, and that


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most that all threads do together, in a second."""

    byte_mads: float  # multiply-adds of bytes
    float_mads: float  # of float32
    memory_bytes: float  # read from memory


def measure_peaks(num_threads: int, *, seconds: float = _SECONDS, read_bytes: int = _READ_BYTES) -> Peaks:
    """Return what so many threads do at once.

    Args:
        seconds: of the processor for each loop but the one that reads memory, at least.
        read_bytes: of memory, all threads together.
    """
    kind = kernel_kind() or ""
    product = product_of(kind)
    num_sums = _MANY_SUMS if product.lanes == LANES else _FEW_SUMS
    mads_of_round = {"bytes": 4 * LANES * num_sums, "small": 4 * LANES * num_sums}
    setups = {
        "bytes": _adding(product, product.add, ir.VectorType(ir.IntType(32), product.lanes), num_sums),
        "small": _adding(product, product.add_small, product.small_sum, num_sums),
    }
    if kind == "amx":
        setups["matrix"] = _adding_tiles
        mads_of_round["matrix"] = _TILES * _GROUP_BYTES * _TILE_ROWS * LANES
    numbers = [np.zeros(1024, np.uint8) for _ in range(num_threads)]
    rates = {
        name: count * _rounds_per_s(name, setups[name], 0, numbers, seconds) for name, count in mads_of_round.items()
    }
    floats = LANES * num_sums * _rounds_per_s("floats", _adding_floats(num_sums), 0, numbers, seconds)
    memory = [np.ones(read_bytes // num_threads, np.uint8) for _ in range(num_threads)]
    step = _VECTOR_BYTES * _READ_AT_ONCE
    read_rate = step * _rounds_per_s("memory", _reading, step, memory, seconds)
    return Peaks(byte_mads=max(rates.values()), float_mads=floats, memory_bytes=read_rate)


def _adding(product: Any, add: Any, kind: Any, num_sums: int) -> Setup:
    """Return sums of products of bytes, as a kind of kernels makes them."""

    def setup(builder: Builder, numbers: Value) -> tuple[list[Value], Body]:
        weights = product.read_weights(builder, numbers)
        row = product.numbers_of(builder, read(builder, numbers, ir.IntType(32)))

        def body(builder: Builder, at: Value, sums: list[Value]) -> list[Value]:
            return [add(builder, one, weights[idx % len(weights)], row) for idx, one in enumerate(sums)]

        return [splat(kind, 0)] * (num_sums * len(weights)), body

    return setup


def _adding_tiles(builder: Builder, numbers: Value) -> tuple[list[Value], Body]:
    """Return sums of products of bytes in the matrix unit."""
    FORMAT.begin(builder, _TILE_ROWS)
    void, tiles = ir.VoidType(), [ir.Constant(ir.IntType(8), tile) for tile in range(2 + _TILES)]
    for tile in tiles:
        call(builder, "llvm.x86.tilezero", void, tile)

    def body(builder: Builder, at: Value, sums: list[Value]) -> list[Value]:
        for tile in tiles[2:]:
            call(builder, "llvm.x86.tdpbsud", void, tile, *tiles[:2])
        return sums

    return [], body


def _adding_floats(num_sums: int) -> Setup:
    """Return sums of products of floats."""

    def setup(builder: Builder, numbers: Value) -> tuple[list[Value], Body]:
        x = read(builder, numbers, FLOATS)

        def body(builder: Builder, at: Value, sums: list[Value]) -> list[Value]:
            return [fma_of(builder, x, x, one) for one in sums]

        return [splat(FLOATS, 0.0)] * num_sums, body

    return setup


def _reading(builder: Builder, numbers: Value) -> tuple[list[Value], Body]:
    """Return sums of what lies in memory."""

    def body(builder: Builder, at: Value, sums: list[Value]) -> list[Value]:
        parts = [read(builder, moved(builder, at, _VECTOR_BYTES * idx), FLOATS) for idx in range(len(sums))]
        return [builder.fadd(*both) for both in zip(sums, parts, strict=True)]

    return [splat(FLOATS, 0.0)] * _READ_AT_ONCE, body


def _rounds_per_s(name: str, setup: Setup, step: int, numbers: Sequence[Any], least_s: float) -> float:
    """Return the rounds of a loop that all threads do in a second.

    Args:
        step: bytes from the numbers of a round to those of the next one; 0: all rounds have the same.
        numbers: of each thread.
        least_s: seconds of the loop, if all rounds have the same numbers.
    """
    run = _code(name, setup, step)
    most = len(numbers[0]) // step if step else 1 << 12
    seconds = _seconds_of(run, most, numbers)
    while not step and seconds < least_s:  # of the same numbers as many rounds as take so long
        most *= 2
        seconds = _seconds_of(run, most, numbers)
    return len(numbers) * most / min(seconds, *(_seconds_of(run, most, numbers) for _ in range(_NUM_RUNS - 1)))


def _code(name: str, setup: Setup, step: int) -> Callable[[int], None]:
    """Return a loop that takes the address of its arguments: rounds, the numbers' address, and room for results."""

    def write_loop(builder: Builder, arguments: Value) -> None:
        rounds, numbers = (read(builder, moved(builder, arguments, 8 * idx), INT) for idx in range(2))
        first, body = setup(builder, numbers)
        index, carried, end = loop(builder, rounds, first)
        new = body(builder, builder.add(numbers, builder.mul(index, ir.Constant(INT, step))), carried)
        end(new)
        for idx, value in enumerate(new):
            write(builder, value, moved(builder, arguments, _VECTOR_BYTES * (1 + idx)))
        if name == "matrix":
            FORMAT.end(builder, _TILE_ROWS)

    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    code = ObjectCode(f"peak_{name}_{source}", write_loop)
    enter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)

    def run(address: int) -> None:
        assert code.address
        enter(address)

    return run


def _seconds_of(run: Callable[[int], None], rounds: int, numbers: Sequence[Any]) -> float:
    """Return the processor's seconds of a thread for so many rounds on all threads at once, their mean."""
    arguments, taken = [np.zeros(_VECTOR_BYTES * 32 // 8, np.int64) for _ in numbers], list[float]()
    for table, of_thread in zip(arguments, numbers, strict=True):
        table[:2] = rounds, of_thread.ctypes.data

    def run_timed(address: int) -> None:
        begin = time.thread_time()
        run(address)
        taken.append(time.thread_time() - begin)

    threads = [threading.Thread(target=run_timed, args=(table.ctypes.data,)) for table in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.fmean(taken)
