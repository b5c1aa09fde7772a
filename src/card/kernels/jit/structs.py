"""Tables of 64-bit entries whose places have names, each declared once as a class.

The class says where each entry lies. Compiled code reads ``table.name``, Python packs values by name and prints them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt


class Place(NamedTuple):
    """The place of an entry in its table."""

    number: int  # of the entry, or of the first one of a table that lies there
    kind: Any  # int, float (of 32 bits), or the class of the table that lies there or whose address does
    is_part: bool  # the table itself lies there
    text: str


class _Declared(NamedTuple):
    """An entry before its class gives it a place."""

    text: str
    is_address: bool


def place(text: str) -> Any:
    """Declare an entry, or a table that lies here, by its annotation."""
    return _Declared(text, False)


def address(text: str) -> Any:
    """Declare the address of a table, which is 0 where there is none."""
    return _Declared(text, True)


class Struct(int):
    """The address of a table. Of the class, a name is the number of its place."""

    places: ClassVar[Mapping[str, Place]] = {}
    size: ClassVar[int] = 0  # entries

    def __init_subclass__(cls) -> None:
        """Give each declared entry its place, one after the other."""
        kinds, places, cls.size = get_type_hints(cls), dict[str, Place](), 0
        for name, declared in vars(cls).copy().items():
            if isinstance(declared, _Declared):
                is_part = issubclass(kinds[name], Struct) and not declared.is_address
                places[name] = Place(cls.size, kinds[name], is_part, declared.text)
                setattr(cls, name, cls.size)
                cls.size += kinds[name].size if is_part else 1
        cls.places = places

    def __getitem__(self, number: float) -> int:  # which type checkers take the place of a float for
        """Return the bits of the entry at a place."""
        return ctypes.c_int64.from_address(self + 8 * int(number)).value

    @classmethod
    def write(cls, table: Any, values: Mapping[str, Any]) -> None:
        """Write entries by name into a table of integers [size].

        Args:
            values: a number, an array whose address is meant, or what has the entries of a table as its ``entry``.
        """
        for name, value in values.items():
            number, kind, is_part, _ = cls.places[name]
            if is_part:
                table[number : number + kind.size] = value.entry.tolist()
            elif isinstance(value, np.ndarray):
                table[number] = value.ctypes.data
            else:
                table[number] = int(np.float32(value).view(np.uint32)) if kind is float else int(value)

    @classmethod
    def pack(cls, values: Mapping[str, Any]) -> npt.NDArray[np.int64]:
        """Return a new table with these entries and zeros elsewhere, see `write`."""
        table = np.zeros(cls.size, np.int64)
        cls.write(table, values)
        return table

    def lines(self) -> list[str]:
        """Return a line for each entry of the table at this address: its name, its value, and what it is."""
        lines = []
        for name, (number, kind, is_part, text) in self.places.items():
            if is_part:
                lines += [f"{name}.{line}" for line in kind(self + 8 * number).lines()]
            else:
                value = ctypes.c_float.from_address(self + 8 * number).value if kind is float else self[number]
                lines.append(f"{name} = {value:g}  # {text}")
        return lines
