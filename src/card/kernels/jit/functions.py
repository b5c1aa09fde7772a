"""Functions of Python that become machine code: the few statements that a pass is written in, as LLVM's instructions.

Numbers are whole (64 bits), floats of 32 bits, or whatever else a module has a kind for. A function holds assignments,
`if`, `while`, `for` over a range with steps forward or over a few tuples, `continue` and `return`. It calls functions
and operations of this module, `min`, `max`, `int`, `np.float32` and `np.sqrt`. Its names are its own variables, whose
kind never changes, or constants of its module. Operations on numbers mean what they mean in Python, but whole numbers
wrap around, and nothing is checked.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import functools
import inspect
import struct
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from card.kernels.jit.arithmetic import (
    BOOL,
    BUILT_IN,
    INT,
    NUMBERS,
    VOID,
    as_kind,
    as_kinds,
    combined,
    kind_of,
    matched,
)
from card.kernels.jit.object_code import Builder, ObjectCode, Value

_SIGNS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Operation:
    """Instructions that stand where functions call them."""

    def __init__(self, instructions: Callable[..., Value], result: Any, arguments: Sequence[Any]) -> None:
        """Take what writes them, (builder, *values) to a value, and the kinds of result and arguments."""
        self._instructions, self._result, self._arguments = instructions, result, arguments

    def write(self, builder: Builder, values: Sequence[Value]) -> Value:
        """Write the instructions; return their value."""
        return self._instructions(builder, *as_kinds(builder, values, self._arguments))


class Function:
    """A function that others call; each module of instructions that calls it gets its own copy."""

    def __init__(self, function: Callable[..., Any], kinds: Mapping[str, Any]) -> None:
        """Take a function whose module defers annotations, which are names of ``kinds``."""
        *self._arguments, self._result = (kinds[name] for name in function.__annotations__.values())
        self.python = function

    def made_in(self, module: Any) -> Any:
        """Return the function in a module of instructions."""
        function = self.python
        name = f"{function.__module__}.{function.__name__}"
        if (made := module.globals.get(name)) is None:
            made = ir.Function(module, ir.FunctionType(self._result, self._arguments), name)
            made.linkage = "internal"
            made.attributes.add("nounwind")
            _InstructionWriter(function, made)
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
        """Run the machine code."""
        self._enter(self._layout.pack(*values))


def _place(builder: Builder, address: Value, number: int) -> Value:
    """Return where one of some arguments is."""
    return builder.inttoptr(builder.add(address, ir.Constant(INT, 8 * number)), ir.PointerType())


class _InstructionWriter:
    """Writes the instructions of one function."""

    def __init__(self, function: Callable[..., Any], made: Any) -> None:
        """Write them all."""
        self._globals: Mapping[str, Any] = function.__globals__
        self._places: dict[str, Value] = {}  # of variables, on the stack; LLVM makes registers of them
        self._nexts: list[Any] = []  # where `continue` leads to, of the loops around
        self._builder: Builder = ir.IRBuilder(made.append_basic_block("entry"))
        self._result = made.function_type.return_type
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(tree, ast.FunctionDef)
        for argument, value in zip(tree.args.args, made.args, strict=True):
            self._set(argument.arg, value)
        self._write(tree.body)
        if not self._builder.block.is_terminated:
            self._builder.ret_void() if self._result == VOID else self._builder.unreachable()

    # ---- statements -------------------------------------------------------------------------------------------------

    def _write(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            getattr(self, f"_write_{type(statement).__name__.lower()}")(statement)

    def _block(self, name: str) -> Any:
        return self._builder.append_basic_block(name)

    def _go(self, block: Any) -> None:
        """Go on in another block, unless this one has been left."""
        if not self._builder.block.is_terminated:
            self._builder.branch(block)

    def _begin(self, block: Any) -> None:
        self._builder.position_at_end(block)

    def _set(self, name: str, value: Any) -> None:
        if name not in self._places:
            with self._builder.goto_entry_block():
                self._places[name] = self._builder.alloca(kind_of(value), name=name)
        place = self._places[name]
        self._builder.store(as_kind(self._builder, value, place.allocated_type), place)

    def _values(self, node: ast.expr) -> list[Any]:
        """Write an expression, or all those of a tuple; return their values."""
        return [self._value(one) for one in (node.elts if isinstance(node, ast.Tuple) else [node])]

    def _assign(self, target: ast.expr, values: Sequence[Any]) -> None:
        """Set a name, or all those of a tuple."""
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        for name, value in zip(names, values, strict=True):
            assert isinstance(name, ast.Name), ast.unparse(target)
            self._set(name.id, value)

    def _write_assign(self, node: ast.Assign) -> None:
        values = self._values(node.value)
        for target in node.targets:
            self._assign(target, values)

    def _write_augassign(self, node: ast.AugAssign) -> None:
        assert isinstance(node.target, ast.Name), ast.unparse(node)
        value = self._value(node.value)
        self._set(node.target.id, combined(self._builder, type(node.op), self._read(node.target.id), value))

    def _write_expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self._value(node.value)

    def _write_return(self, node: ast.Return) -> None:
        if node.value is None:
            self._builder.ret_void()
        else:
            self._builder.ret(as_kind(self._builder, self._value(node.value), self._result))

    def _write_continue(self, node: ast.Continue) -> None:
        self._builder.branch(self._nexts[-1])

    def _write_if(self, node: ast.If) -> None:
        then, other, after = (self._block(name) for name in ("then", "else", "after"))
        self._builder.cbranch(self._truth(node.test), then, other)
        for block, statements in ((then, node.body), (other, node.orelse)):
            self._begin(block)
            self._write(statements)
            self._go(after)
        self._begin(after)

    def _write_while(self, node: ast.While) -> None:
        test, body, after = (self._block(name) for name in ("test", "body", "after"))
        self._go(test)
        self._begin(test)
        self._builder.cbranch(self._truth(node.test), body, after)
        self._begin(body)
        self._write_body(node.body, test)
        self._begin(after)

    def _write_body(self, statements: Sequence[ast.stmt], following: Any) -> None:
        """Write one round of a loop."""
        self._nexts.append(following)
        self._write(statements)
        self._nexts.pop()
        self._go(following)

    def _write_for(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Tuple):
            for values in [self._values(one) for one in node.iter.elts]:
                self._assign(node.target, values)
                following = self._block("following")
                self._write_body(node.body, following)
                self._begin(following)
            return
        assert isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Name), ast.unparse(node.iter)
        limits = [as_kind(self._builder, self._value(one), INT) for one in node.iter.args]
        start, stop, step = {1: [ir.Constant(INT, 0), *limits], 2: limits, 3: limits[:2]}[len(limits)] + (
            limits[2:] or [ir.Constant(INT, 1)]
        )
        before, test, body, following, after = (
            self._builder.block,
            *(self._block(name) for name in ("test", "body", "following", "after")),
        )
        self._go(test)
        self._begin(test)
        index = self._builder.phi(INT)
        index.add_incoming(start, before)
        self._builder.cbranch(self._builder.icmp_signed("<", index, stop), body, after)
        self._begin(body)
        self._set(node.target.id, index)
        self._write_body(node.body, following)
        self._begin(following)
        index.add_incoming(self._builder.add(index, step), following)
        self._builder.branch(test)
        self._begin(after)

    # ---- expressions ------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> Any:
        """Write an expression; return its value, of constants the number."""
        return getattr(self, f"_value_of_{type(node).__name__.lower()}")(node)

    def _truth(self, node: ast.expr) -> Value:
        value = self._value(node)
        if kind_of(value) == BOOL:
            return value
        value = as_kind(self._builder, value, INT)
        return self._builder.icmp_signed("!=", value, ir.Constant(INT, 0))

    def _read(self, name: str) -> Value:
        place = self._places[name]
        return self._builder.load(place, typ=place.allocated_type)

    def _known(self, node: ast.expr) -> Any:
        """Return what a name of the module stands for."""
        if isinstance(node, ast.Attribute):
            return getattr(self._known(node.value), node.attr)
        assert isinstance(node, ast.Name), ast.unparse(node)
        return self._globals[node.id] if node.id in self._globals else getattr(builtins, node.id)

    def _value_of_constant(self, node: ast.Constant) -> Any:
        return node.value

    def _value_of_name(self, node: ast.Name) -> Any:
        return self._read(node.id) if node.id in self._places else self._known(node)

    def _value_of_attribute(self, node: ast.Attribute) -> Any:
        return self._known(node)

    def _value_of_call(self, node: ast.Call) -> Any:
        callee, values = self._known(node.func), [self._value(one) for one in node.args]
        if isinstance(callee, Function | Operation):
            return callee.write(self._builder, values)
        return BUILT_IN[callee.__name__](self._builder, *values)

    def _value_of_unaryop(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return self._builder.not_(self._truth(node.operand))
        assert isinstance(node.op, ast.USub), ast.unparse(node)
        value = self._value(node.operand)
        if isinstance(value, NUMBERS):
            return -value
        return self._builder.neg(value) if value.type == INT else self._builder.fneg(value)

    def _value_of_binop(self, node: ast.BinOp) -> Any:
        return combined(self._builder, type(node.op), self._value(node.left), self._value(node.right))

    def _value_of_compare(self, node: ast.Compare) -> Value:
        [sign], [other] = node.ops, node.comparators
        x, y = matched(self._builder, self._value(node.left), self._value(other))
        compare = self._builder.icmp_signed if x.type == INT else self._builder.fcmp_ordered
        return compare(_SIGNS[type(sign)], x, y)

    def _value_of_boolop(self, node: ast.BoolOp) -> Value:
        """Write `and` or `or` as the truth that it is: what comes behind the one that decides is not run."""
        after, ends, is_and = self._block("decided"), [], isinstance(node.op, ast.And)
        for one in node.values[:-1]:
            value, following = self._truth(one), self._block("else")
            ends.append((ir.Constant(BOOL, not is_and), self._builder.block))
            self._builder.cbranch(value, *((following, after) if is_and else (after, following)))
            self._begin(following)
        last = self._truth(node.values[-1])
        return self._joined(after, [*ends, (last, self._builder.block)])

    def _value_of_ifexp(self, node: ast.IfExp) -> Value:
        then, other, after = (self._block(name) for name in ("then", "else", "chosen"))
        self._builder.cbranch(self._truth(node.test), then, other)
        ends = []
        for block, one in ((then, node.body), (other, node.orelse)):
            self._begin(block)
            ends.append((self._value(one), self._builder.block))
        values = matched(self._builder, *(value for value, _ in ends))
        self._begin(ends[0][1])
        self._go(after)
        self._begin(ends[1][1])
        return self._joined(after, [(value, block) for value, (_, block) in zip(values, ends, strict=True)])

    def _joined(self, after: Any, ends: Sequence[tuple[Value, Any]]) -> Value:
        """Go on behind blocks that each have a value; return that of the one that was run."""
        self._builder.branch(after)
        self._begin(after)
        joined = self._builder.phi(ends[0][0].type)
        for value, block in ends:
            joined.add_incoming(value, block)
        return joined
