"""Arithmetic of functions that become machine code: numbers mean what they mean in Python, but whole ones wrap around.

A value is LLVM's, of a kind, or a constant: a number of Python, which gets its kind where it is used.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from card.kernels.jit.object_code import Builder, Value

BOOL, INT, FLOAT, VOID = ir.IntType(1), ir.IntType(64), ir.FloatType(), ir.VoidType()
NUMBERS = (int, float, np.floating)  # constants, which get their kind where they are used
_PYTHONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {  # on two constants
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_WHOLES = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and_", ast.BitOr: "or_"}  # llvmlite's names
_FLOATS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}


def kind_of(value: Any) -> Any:
    """Return the kind of a value, of a constant the one that it has by itself."""
    if isinstance(value, NUMBERS):
        return INT if isinstance(value, int) else FLOAT
    return value.type


def as_kind(builder: Builder, value: Any, kind: Any) -> Value:
    """Return a value as one of a kind: constants and truths become numbers, all others must have it."""
    if isinstance(value, NUMBERS):
        assert isinstance(value, int) or kind != INT, f"{value} where {kind} belongs"
        return ir.Constant(kind, value if kind == INT else float(value))
    if value.type == BOOL and kind == INT:
        return builder.zext(value, INT)
    assert value.type == kind, f"{value.type} where {kind} belongs"
    return value


def as_kinds(builder: Builder, values: Sequence[Any], kinds: Sequence[Any]) -> list[Value]:
    """Return values as ones of some kinds, one by one."""
    return [as_kind(builder, *both) for both in zip(values, kinds, strict=True)]


def matched(builder: Builder, *values: Any) -> list[Value]:
    """Return values as ones of the kind that those have that are no constants."""
    known = [value for value in values if not isinstance(value, NUMBERS)] or list(values)
    return [as_kind(builder, value, kind_of(known[0])) for value in values]


def combined(builder: Builder, kind: type[ast.operator], left: Any, right: Any) -> Any:
    """Write an operation on two values; return its value, of two constants the number."""
    if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
        return _PYTHONS[kind](left, right)
    x, y = matched(builder, left, right)
    if x.type != INT:
        return getattr(builder, _FLOATS[kind])(x, y)
    if kind not in (ast.FloorDiv, ast.Mod):
        return getattr(builder, _WHOLES[kind])(x, y)
    is_quotient = kind is ast.FloorDiv
    if isinstance(right, int) and right > 0 and right & (right - 1) == 0:
        shift = ir.Constant(INT, right.bit_length() - 1)
        return builder.ashr(x, shift) if is_quotient else builder.and_(x, ir.Constant(INT, right - 1))
    quotient, rest, zero = builder.sdiv(x, y), builder.srem(x, y), ir.Constant(INT, 0)
    # The processor rounds towards zero, Python rounds down.
    has_other_sign = builder.icmp_signed("<", builder.xor(rest, y), zero)
    is_over = builder.and_(builder.icmp_signed("!=", rest, zero), has_other_sign)
    if is_quotient:
        return builder.sub(quotient, builder.zext(is_over, INT))
    return builder.add(rest, builder.select(is_over, y, zero))


def _chosen(sign: str) -> Callable[..., Value]:
    """Return what writes min or max: the second of two if it is less or more than the first."""

    def write(builder: Builder, left: Any, right: Any) -> Value:
        x, y = matched(builder, left, right)
        compare = builder.icmp_signed if x.type == INT else builder.fcmp_ordered
        return builder.select(compare(sign, y, x), y, x)

    return write


def _root(builder: Builder, value: Any) -> Value:
    kind = ir.FunctionType(FLOAT, [FLOAT])
    function = builder.module.globals.get("llvm.sqrt.f32") or ir.Function(builder.module, kind, "llvm.sqrt.f32")
    return builder.call(function, [value])


BUILT_IN: Mapping[str, Any] = {
    "min": _chosen("<"),
    "max": _chosen(">"),
    "int": lambda builder, value: as_kind(builder, value, INT),
    "float32": lambda builder, value: np.float32(value) if isinstance(value, NUMBERS) else builder.sitofp(value, FLOAT),
    "sqrt": _root,
}
