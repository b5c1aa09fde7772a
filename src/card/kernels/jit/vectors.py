"""Vectors of 16 floats as a kind of value in machine code, and what one instruction or a few do with them.

The order of every sum is written down, which is what makes the bits of a result a function of its inputs alone.
Addresses are plain integers: nothing here checks them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir

from card.kernels.jit.functions import Apart, Entered, Function, loading
from card.kernels.jit.instructions import Operation
from card.kernels.jit.object_code import Builder, Value
from card.machine.processor import is_arm

LANES = 16
GROUP = 64  # activations that share a scale
PARTS = GROUP // LANES  # of a group, whose sums are known one by one
SUMS_BYTES = 4 * (1 + PARTS)  # of what `quantize_group` leaves beside a group's bytes and its scale
_F32, _HALF, _I8, _I32, _I64 = ir.FloatType(), ir.HalfType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LANE_0 = ir.Constant(_I32, 0)
FLOATS = ir.VectorType(_F32, LANES)
INTS = ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(_HALF, LANES)
_ROOT_OF_HALF = 0x3F3504F3  # the bits of that float

Floats = Any  # 16 of them, in compiled code

INT, FLOAT, VOID = _I64, _F32, ir.VoidType()
_KINDS = {"int": INT, "float": FLOAT, "Floats": FLOATS, "None": VOID}
F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Return a function for other compiled functions to call; each annotation must be one of `_KINDS`."""
    return cast(F, Function(function, _KINDS))


def separated(function: F) -> F:
    """Return a function that passes call by its address: what only some models need."""
    return cast(F, Apart(function, _KINDS))


def entered(function: F) -> F:
    """Compile a function, or take what an earlier process compiled, for Python to call as well.

    It may be one that others call already.
    """
    return cast(F, Entered(function.python if isinstance(function, Function) else function, _KINDS))


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Value]], Any]:
    """Return what makes an operation of a function that writes its instructions: (builder, *values) to a value."""
    return lambda instructions: Operation(instructions, result, arguments)


# What is at an address: 16 floats, one, or a 64-bit integer.
load, load_float, load_int = (cast(Any, loading(kind)) for kind in (FLOATS, FLOAT, INT))


def call(builder: Builder, name: str, result: Any, *values: Value) -> Value:
    """Call a function of LLVM or of the process by its name."""
    function_type = ir.FunctionType(result, [value.type for value in values])
    known = builder.module.globals.get(name)
    return builder.call(known or ir.Function(builder.module, function_type, name), values)


def loop(builder: Builder, count: Value, first: list[Value]) -> tuple[Value, list[Any], Any]:
    """Begin a loop with values that it carries; return its index, them, and what ends it with their new ones."""
    before = builder.block
    body, after = (builder.append_basic_block(name) for name in ("body", "after"))
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(_I64)
    index.add_incoming(ir.Constant(_I64, 0), before)
    carried = [builder.phi(value.type) for value in first]
    for phi, value in zip(carried, first, strict=True):
        phi.add_incoming(value, before)

    def end(new: list[Value]) -> None:
        following = builder.add(index, ir.Constant(_I64, 1))
        last = builder.block  # another one than the body if there was a loop in it
        index.add_incoming(following, last)
        for phi, value in zip(carried, new, strict=True):
            phi.add_incoming(value, last)
        builder.cbranch(builder.icmp_signed("<", following, count), body, after)
        builder.position_at_end(after)

    return index, carried, end


def read(builder: Builder, address: Value, kind: Any) -> Value:
    """Load a value of a type; it need not be aligned."""
    return builder.load(builder.inttoptr(address, ir.PointerType()), align=1, typ=kind)


def write(builder: Builder, value: Value, address: Value) -> None:
    """Store a value; the place need not be aligned."""
    builder.store(value, builder.inttoptr(address, ir.PointerType()), align=1)


def fetch(builder: Builder, address: Value) -> None:
    """Ask for a line of memory that will be read.

    It comes to the second cache: the nearest takes few lines at a time, and products of one row then waited for it.
    """
    hints = [ir.Constant(_I32, hint) for hint in (0, 2, 1)]  # for reading, into the second cache, as data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), builder.inttoptr(address, ir.PointerType()), *hints)


def moved(builder: Builder, address: Value, num_bytes: int) -> Value:
    """Return an address some bytes further."""
    return builder.add(address, ir.Constant(_I64, num_bytes))


@functools.cache
def splat(kind: Any, number: float) -> Any:
    """Return a constant vector whose lanes all are one number: one object, which llvmlite puts into words once."""
    return ir.Constant(kind, [number] * kind.count)


@functools.cache
def _undefined(kind: Any) -> Any:
    """Return a constant without a value."""
    return ir.Constant(kind, ir.Undefined)


def repeated(builder: Builder, value: Value, kind: Any) -> Value:
    """Return a vector whose lanes all are one value."""
    undefined, places = _undefined(kind), splat(ir.VectorType(_I32, kind.count), 0)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _LANE_0), undefined, places)


def halves_of(builder: Builder, address: Value) -> Value:
    """Return 16 numbers that are stored as float16 at an address."""
    return builder.fpext(read(builder, address, _HALVES), FLOATS)


def bfloat16s_of(builder: Builder, address: Value) -> Value:
    """Return 16 numbers that are stored as bfloat16 at an address."""
    upper = builder.zext(read(builder, address, ir.VectorType(ir.IntType(16), LANES)), INTS)
    return builder.bitcast(builder.shl(upper, splat(INTS, 16)), FLOATS)


def fma_of(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return x * y + z, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, x, y, z)


def _folded(builder: Builder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine the lanes of a vector in a fixed order: halves, quarters, eighths, sixteenths."""
    width = LANES // 2
    while width:
        places = [(lane + width) % LANES for lane in range(LANES)]
        other = builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_I32, LANES), places))
        x = combine(x, other)
        width //= 2
    return builder.extract_element(x, ir.Constant(_I32, 0))


def _maximum(builder: Builder, x: Value, y: Value) -> Value:
    """Return the larger of two; the second one where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _minimum(builder: Builder, x: Value, y: Value) -> Value:
    """Return the smaller of two; the second one where one of them is NaN."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


def _larger_size(builder: Builder, x: Value, y: Value) -> Value:
    """Return the larger of two sizes; NaN where one of them is.

    Compared as whole numbers they have the same order, with NaN behind infinity.
    """
    whole = ir.IntType(32) if x.type == _F32 else INTS
    is_larger = builder.icmp_signed(">", builder.bitcast(x, whole), builder.bitcast(y, whole))
    return builder.select(is_larger, x, y)


def _size(builder: Builder, x: Value) -> Value:
    return call(builder, f"llvm.fabs.v{LANES}f32", FLOATS, x)


@operation(VOID, INT, FLOAT)
def store_float(builder: Builder, address: Value, x: Value) -> None:
    """Store one float."""
    write(builder, x, address)


@operation(VOID, INT, INT)
def store_int(builder: Builder, address: Value, x: Value) -> None:
    """Store one 64-bit integer."""
    write(builder, x, address)


@operation(VOID, INT, FLOATS)
def store(builder: Builder, address: Value, x: Value) -> None:
    """Store 16 floats."""
    write(builder, x, address)


@operation(FLOATS, INT)
def load_halves(builder: Builder, address: Value) -> Value:
    """Return 16 numbers that are stored as float16."""
    return halves_of(builder, address)


@operation(FLOATS, INT)
def load_bfloat16(builder: Builder, address: Value) -> Value:
    """Return 16 numbers that are stored as bfloat16."""
    return bfloat16s_of(builder, address)


@operation(VOID, INT, FLOATS)
def store_halves(builder: Builder, address: Value, x: Value) -> None:
    """Store 16 numbers in 16 bits each; those beyond their range become its ends."""
    most, least = (splat(FLOATS, end) for end in (65504.0, -65504.0))
    write(builder, builder.fptrunc(_maximum(builder, least, _minimum(builder, most, x)), _HALVES), address)


@operation(FLOATS, FLOAT)
def fill(builder: Builder, x: Value) -> Value:
    """Return one number in all lanes."""
    return repeated(builder, x, FLOATS)


# Lane by lane: x * y + z, rounded once; x + y; x * y; x / y; the larger; the smaller. Where one of two is NaN, the
# larger and the smaller are the second one, as one instruction has it: what may be NaN stands there.
fma = operation(FLOATS, FLOATS, FLOATS, FLOATS)(fma_of)
add = operation(FLOATS, FLOATS, FLOATS)(lambda builder, x, y: builder.fadd(x, y))
times = operation(FLOATS, FLOATS, FLOATS)(lambda builder, x, y: builder.fmul(x, y))
divide = operation(FLOATS, FLOATS, FLOATS)(lambda builder, x, y: builder.fdiv(x, y))
maximum = operation(FLOATS, FLOATS, FLOATS)(_maximum)
minimum = operation(FLOATS, FLOATS, FLOATS)(_minimum)


@operation(FLOATS, FLOATS)
def rounded(builder: Builder, x: Value) -> Value:
    """Return the nearest whole numbers, halves to even."""
    return call(builder, f"llvm.roundeven.v{LANES}f32", FLOATS, x)


@operation(FLOATS, FLOATS)
def two_to_the(builder: Builder, x: Value) -> Value:
    """Return 2^x of whole numbers from -126 to 127."""
    exponents = builder.add(builder.fptosi(x, INTS), splat(INTS, 127))
    return builder.bitcast(builder.shl(exponents, splat(INTS, 23)), FLOATS)


@operation(FLOATS, FLOATS)
def exponent(builder: Builder, x: Value) -> Value:
    """Return the whole numbers e for which x / 2^e lies between the root of 1/2 and that of 2; x is normal, above 0."""
    above_root = builder.sub(builder.bitcast(x, INTS), splat(INTS, _ROOT_OF_HALF))
    return builder.sitofp(builder.ashr(above_root, splat(INTS, 23)), FLOATS)


@operation(FLOATS, FLOATS, FLOATS)
def scaled_down(builder: Builder, x: Value, whole: Value) -> Value:
    """Return x / 2^e of its `exponent` e: exact."""
    less = builder.shl(builder.fptosi(whole, INTS), splat(INTS, 23))
    return builder.bitcast(builder.sub(builder.bitcast(x, INTS), less), FLOATS)


@operation(FLOAT, FLOATS)
def total(builder: Builder, x: Value) -> Value:
    """Return the sum of the lanes, in an order that never changes."""
    return _folded(builder, x, builder.fadd)


@operation(FLOAT, FLOATS)
def largest(builder: Builder, x: Value) -> Value:
    """Return the largest lane."""
    return _folded(builder, x, lambda a, b: _maximum(builder, a, b))


@operation(FLOATS, FLOATS, FLOATS)
def larger_size(builder: Builder, size: Value, x: Value) -> Value:
    """Return a size or that of x, lane by lane: the larger one, and NaN where one is."""
    return _larger_size(builder, size, _size(builder, x))


@operation(FLOAT, FLOATS)
def largest_size(builder: Builder, sizes: Value) -> Value:
    """Return the largest lane of sizes; NaN if one is."""
    return _folded(builder, sizes, lambda a, b: _larger_size(builder, a, b))


@operation(VOID, INT, INT, INT)
def copy_group(builder: Builder, source: Value, place: Value, stride: Value) -> None:
    """Copy GROUP floats, 16 at a time, to places that are ``stride`` bytes apart."""
    for part in range(PARTS):
        write(builder, read(builder, moved(builder, source, 4 * LANES * part), FLOATS), place)
        place = builder.add(place, stride)


def _sums_of_parts(builder: Builder, parts: list[Value]) -> list[Value]:
    """Return the sum of the lanes of each of four vectors of integers."""
    for width in (LANES // 2, LANES // 4):  # halves of two vectors, then quarters of four, beside each other in one
        low = [lane for lane in range(2 * LANES) if not lane & width]
        places = [ir.Constant(INTS, [lane + more for lane in low]) for more in (0, width)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.add(*(builder.shuffle_vector(*pair, place) for place in places)) for pair in pairs]
    [sums] = parts
    for width in (1, 2):
        places = ir.Constant(INTS, [lane ^ width for lane in range(LANES)])
        sums = builder.add(sums, builder.shuffle_vector(sums, sums, places))
    return [builder.extract_element(sums, ir.Constant(_I32, LANES // 4 * i)) for i in range(4)]


@operation(VOID, INT, INT, INT, INT, INT)
def quantize_group(
    builder: Builder, source: Value, numbers: Value, scale_at: Value, sums_at: Value, stride: Value
) -> None:
    """Make GROUP floats signed bytes with one scale, and leave their sums as integers, ``stride`` bytes apart.

    The first sum is -128 times that of all, where products with weights around 128 start from. The sum of each 16
    follows. A NaN makes the scale NaN, whatever the bytes are then.
    """
    parts = [read(builder, moved(builder, source, 4 * LANES * i), FLOATS) for i in range(PARTS)]
    sizes = [_size(builder, part) for part in parts]
    while len(sizes) > 1:
        sizes = [_larger_size(builder, sizes[0], sizes[1]), *sizes[2:]]
    size = _folded(builder, sizes[0], lambda a, b: _larger_size(builder, a, b))
    zero, most = ir.Constant(_F32, 0.0), ir.Constant(_F32, 127.0)
    is_some = builder.fcmp_unordered(">", size, ir.Constant(_F32, 1e-30))
    inverse = builder.select(is_some, builder.fdiv(most, size), zero)
    factor = repeated(builder, inverse, FLOATS)
    wholes = []
    for i, part in enumerate(parts):
        near = call(builder, f"llvm.roundeven.v{LANES}f32", FLOATS, builder.fmul(part, factor))
        wholes.append(builder.fptosi(near, INTS))
        packed = builder.trunc(wholes[-1], ir.VectorType(_I8, LANES))
        write(builder, packed, moved(builder, numbers, LANES * i))
    write(builder, builder.select(is_some, builder.fdiv(size, most), zero), scale_at)
    sums = _sums_of_parts(builder, wholes)
    together = sums[0]
    for one in sums[1:]:
        together = builder.add(together, one)
    for value in [builder.mul(together, ir.Constant(_I32, -128)), *sums]:
        write(builder, value, sums_at)
        sums_at = builder.add(sums_at, stride)


@operation(INT, INT)
def arrive(builder: Builder, address: Value) -> Value:
    """Add 1 to a counter that threads share; return what it was."""
    place = builder.inttoptr(address, ir.PointerType())
    return builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "seq_cst")


@operation(INT, INT)
def look(builder: Builder, address: Value) -> Value:
    """Return a counter that threads share."""
    return builder.load_atomic(builder.inttoptr(address, ir.PointerType()), "acquire", 8, typ=_I64)


@operation(VOID)
def pause(builder: Builder) -> None:
    """Let the core rest for a moment."""
    if is_arm():
        call(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(_I32, 1))  # YIELD
    else:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@operation(VOID)
def let_others_run(builder: Builder) -> None:
    """Let other threads use the core."""
    call(builder, "sched_yield", _I32)
