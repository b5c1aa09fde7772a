"""Functions of Python that become machine code: the few statements that a pass is written in, as LLVM's instructions.

Numbers are whole (64 bits), floats of 32 bits, or whatever else a module has a kind for. A function holds assignments,
`if`, `while`, `for` over a range with steps forward or over a few tuples, `continue` and `return`. It calls functions
and operations of this module, `min`, `max`, `int`, `np.float32` and `np.sqrt`. Its names are its own variables, whose
kind never changes, or constants of its module. Operations on numbers mean what they mean in Python, but whole numbers
wrap around, and nothing is checked. A `Struct` is a whole number, the address of a table: ``table.name`` reads an entry
or is the address of a part, ``table[place]`` reads the entry at a place as a whole number. An argument that is a named
tuple stands for its fields, one by one; a call makes it in place.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from card.kernels.jit.arithmetic import FLOAT, INT, VOID, as_kinds
from card.kernels.jit.instructions import InstructionWriter, Operation, is_bundle, is_struct
from card.kernels.jit.object_code import Builder, ObjectCode, Value


class Function(Operation):
    """A function that others call; each module of instructions that calls it gets its own copy."""

    def __init__(self, function: Callable[..., Any], kinds: Mapping[str, Any]) -> None:
        """Take a function whose module defers annotations, which are names of ``kinds``."""

        def kinds_of(name: str) -> list[Any]:
            if name in kinds:
                return [kinds[name]]
            known = function.__globals__[name]
            assert is_struct(known) or is_bundle(known), f"{name} is no kind that compiled code has"
            return [INT] * len(getattr(known, "_fields", "1"))

        *arguments, [self._result] = map(kinds_of, function.__annotations__.values())
        self._arguments = [kind for argument in arguments for kind in argument]
        self.python = function
        result = function.__globals__.get(function.__annotations__["return"])
        self.struct = result if is_struct(result) else None  # that it returns; None: a number

    def made_in(self, module: Any) -> Any:
        """Return the function in a module of instructions."""
        function = self.python
        name = f"{function.__module__}.{function.__name__}"
        if (made := module.globals.get(name)) is None:
            made = ir.Function(module, ir.FunctionType(self._result, self._arguments), name)
            made.linkage = "internal"
            made.attributes.add("nounwind")
            InstructionWriter(function, made, _READERS)
        return made

    def write(self, builder: Builder, values: Sequence[Value]) -> Value:
        """Write a call; return its value."""
        return builder.call(self.made_in(builder.module), as_kinds(builder, values, self._arguments))

    def _compiled(self) -> ObjectCode:
        """Return machine code that takes the address of the arguments, and leaves a result where the first one was."""
        name = f"{self.python.__module__.rpartition('.')[2]}_{self.python.__name__}"
        return ObjectCode(name, self._write_entry, is_optimized=True)

    def _write_entry(self, builder: Builder, address: Value) -> None:
        """Write what reads the arguments, each in 8 bytes from an address on, and calls the function."""
        values = [
            builder.load(_place(builder, address, i), align=1, typ=kind) for i, kind in enumerate(self._arguments)
        ]
        result = Function.write(self, builder, values)
        if self._result != VOID:
            builder.store(result, _place(builder, address, 0), align=1)


class Apart(Function):
    """A function of whole numbers with machine code of its own: a pass calls it by its address, the first argument.

    It is compiled when a model asks for the address, and no pass of others holds it.
    """

    @functools.cached_property
    def address(self) -> int:
        """The address of the machine code, valid as long as this object lives."""
        self._code = self._compiled()
        return self._code.address

    def write(self, builder: Builder, values: Sequence[Value]) -> Value:
        """Write a call; return its value, or what the first argument was where there is none."""
        arguments = as_kinds(builder, values, self._arguments)
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(INT, len(arguments)))
        places = builder.ptrtoint(room, INT)
        for i, argument in enumerate(arguments):
            builder.store(argument, _place(builder, places, i))
        kind = ir.FunctionType(VOID, [INT])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [places])
        return builder.load(_place(builder, places, 0), typ=INT)


class Entered(Function):
    """A function that Python may call, too: it takes numbers, returns none, and runs without Python's lock."""

    def __init__(self, function: Callable[..., Any], kinds: Mapping[str, Any]) -> None:
        """Compile the function, or take what an earlier process compiled."""
        super().__init__(function, kinds)
        self._layout = struct.Struct("=" + "".join("q" if kind == INT else "f4x" for kind in self._arguments))
        self._code = self._compiled()
        self._enter = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._code.address)

    def __call__(self, *values: float) -> None:
        self._enter(self._layout.pack(*values))


def loading(kind: Any) -> Operation:
    """Return what reads a value of a kind at an address, which need not be aligned."""
    return Operation(
        lambda builder, at: builder.load(builder.inttoptr(at, ir.PointerType()), align=1, typ=kind), kind, [INT]
    )


_load_int: Any = loading(INT)
_load_float: Any = loading(FLOAT)


def entry(table: int, place: int) -> int:
    """Return what a table holds at a place."""
    return _load_int(table + 8 * place)


def real_entry(table: int, place: int) -> float:
    """Return the float32 that a table holds at a place."""
    return _load_float(table + 8 * place)


_READERS: Mapping[type, Operation] = {
    kind: Function(one, {"int": INT, "float": FLOAT}) for kind, one in ((int, entry), (float, real_entry))
}


def _place(builder: Builder, address: Value, number: int) -> Value:
    """Return where one of some arguments is."""
    return builder.inttoptr(builder.add(address, ir.Constant(INT, 8 * number)), ir.PointerType())
