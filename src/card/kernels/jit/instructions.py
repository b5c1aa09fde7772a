"""Statements and expressions of Python, written as LLVM's instructions: the body of a function, see `functions`."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from card.kernels.jit.object_code import Builder, Value
from card.kernels.jit.structs import Struct

_SIGNS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Operation:
    """Instructions that stand where functions call them."""

    def __init__(self, instructions: Callable[..., Value], result: Any, arguments: Sequence[Any]) -> None:
        """Take what writes them, (builder, *values) to a value, and the kinds of result and arguments."""
        self._instructions, self._result, self._arguments = instructions, result, arguments

    def write(self, builder: Builder, values: Sequence[Value]) -> Value:
        """Write the instructions; return their value."""
        return self._instructions(builder, *as_kinds(builder, values, self._arguments))


def is_struct(known: Any) -> bool:
    """Return whether something is a kind of table."""
    return isinstance(known, type) and issubclass(known, Struct)


def is_bundle(known: Any) -> bool:
    """Return whether something is a kind of named tuple."""
    return isinstance(known, type) and hasattr(known, "_fields")


def _parts(node: ast.expr) -> list[ast.expr]:
    """Return the expressions of a tuple, or the one that is none."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


class InstructionWriter:
    """Writes the instructions of one function."""

    def __init__(self, function: Callable[..., Any], made: Any, readers: Mapping[type, Operation]) -> None:
        """Write them all.

        Args:
            readers: what reads an entry of a table, (table, place) to a value, by its kind.
        """
        self._readers = readers
        self._globals: Mapping[str, Any] = function.__globals__
        self._places: dict[str, Value] = {}  # of variables, on the stack; LLVM makes registers of them
        self._structs: dict[str, type[Struct] | None] = {}  # of variables that are tables
        self._fields: dict[str, list[str]] = {}  # variables of arguments that are named tuples
        self._nexts: list[Any] = []  # where `continue` leads to, of the loops around
        self._builder: Builder = ir.IRBuilder(made.append_basic_block("entry"))
        self._result = made.function_type.return_type
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(tree, ast.FunctionDef)
        self._take(function.__annotations__, iter(made.args))
        self._write(tree.body)
        if not self._builder.block.is_terminated:
            self._builder.ret_void() if self._result == VOID else self._builder.unreachable()

    def _take(self, annotations: Mapping[str, str], values: Iterator[Value]) -> None:
        """Begin with variables for all arguments."""
        for name, kind in itertools.islice(annotations.items(), len(annotations) - 1):  # the last one is the result
            known = self._globals.get(kind)
            self._structs[name] = known if is_struct(known) else None
            if is_bundle(known):
                self._fields[name] = [f"{name}.{field}" for field in known._fields]  # type: ignore[union-attr]
            for one in self._fields.get(name, [name]):
                self._set(one, next(values))

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
        return [self._value(one) for one in _parts(node)]

    def _assign(self, target: ast.expr, source: ast.expr, values: Sequence[Any]) -> None:
        """Set a name, or all those of a tuple, to what was written of an expression."""
        for name, node, value in zip(_parts(target), _parts(source), values, strict=True):
            assert isinstance(name, ast.Name), ast.unparse(target)
            self._set(name.id, value)
            self._structs[name.id] = self._struct_of(node)

    def _write_assign(self, node: ast.Assign) -> None:
        values = self._values(node.value)
        for target in node.targets:
            self._assign(target, node.value, values)

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
            for source, values in [(one, self._values(one)) for one in node.iter.elts]:
                self._assign(node.target, source, values)
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

    def _struct_of(self, node: ast.expr) -> type[Struct] | None:
        """Return the table whose address an expression is; None for other numbers."""
        if isinstance(node, ast.Name):
            return self._structs.get(node.id)
        if isinstance(node, ast.Call):
            callee = self._known(node.func)
            return callee if is_struct(callee) else getattr(callee, "struct", None)
        if isinstance(node, ast.Attribute) and (struct := self._struct_of(node.value)) is not None:
            kind = struct.places[node.attr].kind
            return kind if issubclass(kind, Struct) else None
        return None

    def _value_of_constant(self, node: ast.Constant) -> Any:
        return node.value

    def _value_of_name(self, node: ast.Name) -> Any:
        return self._read(node.id) if node.id in self._places else self._known(node)

    def _value_of_attribute(self, node: ast.Attribute) -> Any:
        struct = self._struct_of(node.value)
        if (name := ast.unparse(node)) in self._places:  # of a named tuple
            return self._read(name)
        if struct is None:
            return self._known(node)
        number, kind, is_part, _ = struct.places[node.attr]
        table = self._value(node.value)
        if is_part:
            return self._builder.add(table, ir.Constant(INT, 8 * number))
        return self._readers[float if kind is float else int].write(self._builder, [table, number])

    def _value_of_subscript(self, node: ast.Subscript) -> Any:
        return self._readers[int].write(self._builder, [self._value(node.value), self._value(node.slice)])

    def _value_of_call(self, node: ast.Call) -> Any:
        callee, values = self._known(node.func), self._arguments(node)
        if isinstance(callee, Operation):
            return callee.write(self._builder, values)
        if is_struct(callee):
            return values[0]
        return BUILT_IN[callee.__name__](self._builder, *values)

    def _arguments(self, node: ast.Call) -> list[Any]:
        """Write the arguments of a call; return their values, of named tuples all of them."""
        values = []
        for one in node.args:
            if isinstance(one, ast.Name) and one.id in self._fields:
                values += [self._read(name) for name in self._fields[one.id]]
            elif isinstance(one, ast.Call) and is_bundle(self._known(one.func)):
                values += self._arguments(one)
            else:
                values.append(self._value(one))
        return values

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
