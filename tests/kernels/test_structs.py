"""Tables of named places: where entries lie, how Python packs and prints them, and how compiled code reads them."""

from __future__ import annotations

import ast
import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from card.kernels.int8_linear import why_not_int8
from card.kernels.jit import tables
from card.kernels.jit.structs import Struct, address, place
from card.kernels.machine_code import machine_code

REASON = why_not_int8()
JIT = Path(tables.__file__).parent
MOST_KINDS = 3  # names of one range: kinds of something, and no places


class Inner(Struct):
    """A part of another table."""

    first: int = place("a number")
    half: float = place("a float")


class Outer(Struct):
    """A table with all kinds of entries."""

    count: int = place("how many")
    part: Inner = place("lies here")
    scale: float = place("what numbers are times")
    array: int = place("where numbers lie")
    other: Inner = address("lies elsewhere; 0: nowhere")


class Packed:
    """Holds the entries of a table, as a packed linear layer does."""

    entry = Inner.pack({"first": 7, "half": 0.5})


def packed(array: Any, other: Any) -> np.ndarray:
    return Outer.pack({"count": 3, "part": Packed(), "scale": -1.25, "array": array, "other": other})


def test_entries_lie_one_after_the_other_and_parts_take_their_size() -> None:
    places = (Outer.count, Outer.part, Outer.scale, Outer.array, Outer.other)
    assert places == (0, 1, 3, 4, 5)
    assert (Inner.size, Outer.size) == (2, 6)


def test_python_packs_numbers_addresses_floats_and_parts_by_name() -> None:
    array, other = np.arange(3.0), Inner.pack({})
    table = packed(array, other)
    floats = table.view(np.float32)
    assert table[Outer.count] == 3
    assert (table[Outer.part + Inner.first], floats[2 * (Outer.part + Inner.half)]) == (7, 0.5)
    assert (floats[2 * Outer.scale], table[Outer.scale] >> 32) == (-1.25, 0), "the upper half stays 0"
    assert (table[Outer.array], table[Outer.other]) == (array.ctypes.data, other.ctypes.data)


def test_an_array_of_c_is_written_too_and_what_is_not_named_stays() -> None:
    table = (ctypes.c_int64 * Outer.size)(*[9] * Outer.size)
    Outer.write(table, {"count": 1, "part": Packed()})
    assert list(table)[:2] == [1, 7] and list(table)[3:] == [9, 9, 9]


def test_a_name_that_the_table_has_not_is_refused() -> None:
    with pytest.raises(KeyError, match="size_of_all"):
        Outer.pack({"size_of_all": 1})


def test_a_table_is_printed_entry_by_entry() -> None:
    table = packed(0, 0)
    assert Outer(table.ctypes.data).lines() == [
        "count = 3  # how many",
        "part.first = 7  # a number",
        "part.half = 0.5  # a float",
        "scale = -1.25  # what numbers are times",
        "array = 0  # where numbers lie",
        "other = 0  # lies elsewhere; 0: nowhere",
    ]


store: Any = machine_code("vectors").store_float if REASON is None else None


def other_of(table: Outer, count: int) -> Inner:
    return Inner(table.other + 8 * Inner.size * count)


def read_entries(table: Outer, out: int) -> None:
    part, number = table.part, table[Outer.array]
    store(out, np.float32(table.count + part.first + number))
    store(out + 4, table.scale * part.half)
    if table.other:
        for last in (other_of_compiled(table, 1), table.other):
            store(out + 8, np.float32(last.first) + last.half)
            out += 4
        store(out + 8, np.float32(other_of_compiled(table, 1).first))


other_of_compiled: Any = machine_code("vectors").compiled(other_of) if REASON is None else None


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_compiled_code_reads_entries_parts_and_other_tables_by_name() -> None:
    others = np.concatenate([Inner.pack({"first": 20, "half": 0.25}), Inner.pack({"first": 40, "half": 0.125})])
    read: Any = machine_code("vectors").entered(read_entries)
    out = np.zeros(5, np.float32)
    table = packed(5, others)
    read(table.ctypes.data, out.ctypes.data)
    assert out.tolist() == [3 + 7 + 5, -1.25 * 0.5, 40.125, 20.25, 40]
    out[:] = 0
    read(packed(5, 0).ctypes.data, out.ctypes.data)
    assert out[2:].tolist() == [0, 0, 0], "there is no other table"


class Pair(NamedTuple):
    """Two numbers that go together."""

    low: int
    high: int


def difference(pair: Pair, factor: int) -> int:
    return (pair.high - pair.low) * factor


difference_compiled: Any = machine_code("vectors").compiled(difference) if REASON is None else None


def store_differences(pair: Pair, out: int) -> None:
    store(out, np.float32(difference_compiled(pair, 10)))
    store(out + 4, np.float32(difference_compiled(Pair(pair.high, 3), 1)))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_an_argument_that_is_a_named_tuple_stands_for_its_fields() -> None:
    run: Any = machine_code("vectors").entered(store_differences)
    out = np.zeros(2, np.float32)
    run(4, 9, out.ctypes.data)
    assert out.tolist() == [50, -6]


def test_no_table_of_a_pass_is_read_by_the_number_of_a_place() -> None:
    faults = []
    for path in JIT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if calls and node.func.id in ("entry", "real_entry"):  # type: ignore[attr-defined]
                faults.append(f"{path.name}:{node.lineno}: reads a table by {ast.unparse(node)}; declare a Struct")
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                is_range = ast.unparse(node.value).startswith("range(")
                if is_range and len(node.targets[0].elts) > MOST_KINDS:
                    faults.append(f"{path.name}:{node.lineno}: numbers places by hand; declare a Struct")
    assert not faults, "\n".join(faults)


def test_every_entry_says_what_it_is() -> None:
    structs = [one for one in vars(tables).values() if isinstance(one, type) and issubclass(one, Struct)]
    assert {"LayerTable", "PassTable", "RowTable"} <= {struct.__name__ for struct in structs}
    assert not [
        (struct.__name__, name) for struct in structs for name, one in struct.places.items() if len(one.text) < 5
    ]
