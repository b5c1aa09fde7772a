"""Whether a JSON schema that refers to itself comes to an end: a grammar made of one that does not has no text."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

_BRANCHES = ("anyOf", "oneOf")


def has_an_end(schema: object) -> bool:
    """Return whether some finite value may fit ``schema``, as far as its references and required parts tell.

    `{"$ref": "#"}` fits nothing that could ever be written down, nor does an object that requires another one like it.
    References elsewhere and those that lead nowhere count as having an end.
    """
    try:
        return _Ends(schema).of_root()
    except RecursionError:  # too long a chain of references to follow here: whoever uses the schema will see
        return True


class _Ends:
    """Finds what has an end, bottom up: in each walk a reference that is being followed has none yet."""

    def __init__(self, schema: object) -> None:
        self._root = schema
        self._ended: set[str] = set()  # references that have an end, for certain
        self._seen: set[str] = set()  # references that this walk has followed

    def of_root(self) -> bool:
        """Walk until nothing more is found out."""
        while True:
            num_ended, self._seen = len(self._ended), set()
            if self._of(self._root):
                return True
            if len(self._ended) == num_ended:
                return False

    def _of(self, schema: object) -> bool:
        if not isinstance(schema, dict):
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._of_reference(reference):
            return False
        if any(not self._of(one) for one in _list(schema.get("allOf"))):
            return False
        for name in _BRANCHES:
            branches = _list(schema.get(name))
            if branches and not any([self._of(one) for one in branches]):
                return False
        return self._of_parts(schema)

    def _of_reference(self, reference: str) -> bool:
        if reference not in self._ended and reference not in self._seen:
            self._seen.add(reference)
            if self._of(_target(self._root, reference)):
                self._ended.add(reference)
        return reference in self._ended

    def _of_parts(self, schema: dict[str, Any]) -> bool:
        """Look at the parts that no object or array of this schema can do without."""
        kind, properties = schema.get("type"), schema.get("properties")
        if kind == "object" and isinstance(properties, dict):
            return all(
                self._of(properties.get(name)) for name in _list(schema.get("required")) if isinstance(name, str)
            )
        least = schema.get("minItems")
        if kind == "array" and isinstance(least, int) and least > 0:
            first = [*_list(schema.get("prefixItems"))[:least]]
            return all(self._of(one) for one in (first if len(first) == least else [*first, schema.get("items")]))
        return True


def _target(root: object, reference: str) -> object:
    """Return what a reference within the schema names; None if it leads nowhere or elsewhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
