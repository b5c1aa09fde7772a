"""Settings are declared once: default, meaning and bounds. Checks, options and request fields derive from that."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from card.errors import CardError, SettingsError, known_instead, named

T = TypeVar("T")
if TYPE_CHECKING:

    class Listed(Generic[T]):
        """A tuple that may be given as one value alone, or as any sequence: what is taken differs from what is read."""

        def __get__(self, owner: object, kind: type | None = None) -> tuple[T, ...]: ...

        def __set__(self, owner: object, value: T | Sequence[T]) -> None: ...

else:
    Listed = tuple[T, ...]
_KINDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", Mapping: "a mapping"}
_PLAIN = frozenset({NoneType, str, int, float, bool, tuple})
_FLAG = re.compile(r"--([a-z][a-z-]*)")
_MOST_SECONDS = 10**9  # 31 years; a thread cannot wait for 300
_INTEGERS = range(-(2**63), 2**63)  # outside of Python a number has room for no other


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The values that a number, or an item of a list, may have; for a text they bound the length."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def hold(self, value: Any) -> bool:
        """Return whether ``value`` lies within the bounds; False for anything but a number."""
        size = len(value) if isinstance(value, str) else value
        return (
            (self.least is None or size >= self.least)
            and (self.above is None or size > self.above)
            and (self.most is None or size <= self.most)
            and (self.below is None or size < self.below)
        )

    def __str__(self) -> str:
        low = f"at least {self.least}" if self.least is not None else f"above {self.above}" if _is(self.above) else ""
        high = f"at most {self.most}" if self.most is not None else f"below {self.below}" if _is(self.below) else ""
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        if low and high:
            return f"{low} and {high}"
        return f"{self.least} or more" if self.least is not None else low or high


@dataclass(frozen=True, slots=True, kw_only=True)
class InRequest:
    """The field of a request that sets it: at which doors of the server, under which name, and within which bounds."""

    doors: tuple[str, ...]
    names: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # at the doors where it has another name than the setting
    second_names: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # at the doors where some clients write it under another name; only for a setting that may be None
    bounds: Bounds | None = None  # where they are wider than the setting's own, which takes the nearest value then
    words: str = ""  # on the values that only a request may have

    def name_at(self, door: str, setting: str) -> str:
        """Return its name at a door; empty if the door has no such field."""
        return self.names.get(door, setting) if door in self.doors else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    meaning: str = ""
    bounds: Bounds = Bounds()
    num_items: tuple[int, int] = (0, 1 << 31)  # fewest and most of a list
    unit: str = ""
    allowed: str = ""
    shown: str = ""
    section: str = ""  # of the help; empty: that of the class, its SECTION
    is_option: bool = True  # of the commands that take all settings of its class
    is_common: bool = False  # shown by --help too, not only by --help-all
    in_request: InRequest | None = None  # None: no client of the server sets it by a field of this form
    read_by: str | tuple[str, ...] = ()  # what reads it, see `card.config.reading`; empty: every engine


def setting(
    default: T = dataclasses.MISSING,  # type: ignore[assignment]
    meaning: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    factory: Callable[[], T] | None = None,
    **rule: Any,
) -> T:
    """Declare a field of a dataclass.

    Args:
        meaning: a sentence, also used as the help of its option.
        least, above, most, below: bounds; an infinite bound rules out infinity and is not mentioned.
        factory: makes the default, if it is a mapping.
        num_items: fewest and most items of a list.
        unit: of the bounds, in words.
        allowed: the allowed values in words, where bounds and type do not suffice.
        shown: the default in words, where the value itself is not clear.
        section, is_option, is_common: whether commands have an option for it, and its place in their help.
        in_request: the field of a request that sets it.
        read_by: what reads it, see `card.config.reading`.
    """
    bounds = Bounds(least=least, above=above, most=most, below=below)
    metadata = {"rule": _Rule(meaning=meaning, bounds=bounds, **rule)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, hash=False, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Setting:
    """A declared field."""

    name: str
    kind: Any  # of the value, or of the items of a list
    is_optional: bool  # may be None
    is_list: bool
    choices: tuple[str, ...]  # empty: any value
    default: Any
    rule: _Rule

    @property
    def shown(self) -> str:
        """The default in words; empty if there is none to show."""
        is_nothing = self.default is None or self.default is False or self.default == ()
        default = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return self.rule.shown or ("" if is_nothing else default)

    @property
    def readers(self) -> tuple[str, ...]:
        """The readers of the setting; empty: every engine."""
        given = self.rule.read_by
        return (given,) if isinstance(given, str) else given

    def plain(self, given: Any) -> Any:
        """Return a value as it is stored: `plain`, and a tuple for a list, which may be given as any sequence."""
        value = plain(given)
        return _as_tuple(value, self.kind) if self.is_list and not (value is None and self.is_optional) else value

    def nearest(self, value: Any) -> Any:
        """Return the value of the setting for that of a request, whose bounds may be wider."""
        bounds = self.rule.bounds
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if bounds.least is not None and value < bounds.least:
            return type(value)(bounds.least)
        return math.nextafter(bounds.above, math.inf) if bounds.above is not None and value <= bounds.above else value

    def fault(self, value: object) -> str:
        """Return what is allowed instead of ``value``; empty if ``value`` is valid."""
        if value is None and self.is_optional:
            return ""
        if self.choices:
            return "" if value in self.choices else "one of " + ", ".join(self.choices)
        fewest, most = self.rule.num_items
        if self.is_list and not (isinstance(value, tuple) and fewest <= len(value) <= most):
            return self.rule.allowed
        for item in value if isinstance(value, tuple) else (value,):
            if not self._is_of_kind(item):
                is_told = self.rule.allowed and (self.is_list or self.is_optional)  # their type says too little
                return self.rule.allowed if is_told else _KINDS[self.kind] + (" or None" if self.is_optional else "")
            if item == "" and self.default != "" and not self.is_list:
                return self.rule.allowed or "a string that is not empty"
            if not self.rule.bounds.hold(item):
                words = self.rule.allowed or f"{self.rule.bounds} {self.rule.unit}".rstrip()
                return f"finite and {words}" if item in (math.inf, -math.inf) else words
            if self.rule.unit == "seconds" and item > _MOST_SECONDS:
                return f"at most {_MOST_SECONDS:,} seconds"
            if isinstance(item, int) and item not in _INTEGERS:
                return "a number of 64 bits at most"
        return ""

    def _is_of_kind(self, item: object) -> bool:
        if self.kind in _KINDS:
            accepted = (int, float) if self.kind is float else self.kind
            return isinstance(item, accepted) and isinstance(item, bool) == (self.kind is bool)
        return not isinstance(self.kind, type) or isinstance(item, self.kind)


class Replaceable:
    """Lets a frozen settings object be copied with some values changed; unknown names raise SettingsError."""

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Refuse unknown names before the dataclass does, whose TypeError lists neither known nor similar names."""
        refuse_unknown(values, declared(cls))
        return super().__new__(cls)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes``. Raises: SettingsError for a name that does not exist."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


class Checked(Replaceable):
    """Settings that are made plain and checked on creation. Raises: SettingsError for an invalid value."""

    def __post_init__(self) -> None:
        make_plain(self)
        check(self)


def listed(default: tuple[T, ...], meaning: str, **rule: Any) -> Listed[T]:
    """Declare a field for a list, which may be given as one value alone; arguments as of `setting`."""
    declaration: Any = setting(default, meaning, **rule)
    return cast("Listed[T]", declaration)


def refuse_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Raise SettingsError for the first unknown name."""
    for name in names:
        if name not in known:
            raise SettingsError(f"unknown setting {name!r}; {known_instead(name, known)}")


def described(settings: Mapping[str, Setting]) -> str:
    """Return a line for each setting: its default and its meaning, in Python's words."""
    lines = []
    for name, one in settings.items():
        otherwise = f" None: {one.shown}." if one.default is None and one.shown else ""
        words = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), f"{one.rule.meaning}{otherwise}")
        lines.append(f"    {name} = {one.default!r}: {words}")
    return "\n".join(lines)


def declared(owner: type) -> Mapping[str, Setting]:
    """Return the fields of a dataclass, by name."""
    return _declared(owner)


@cache
def _declared(owner: type) -> Mapping[str, Setting]:
    hints = get_type_hints(owner)
    section = getattr(owner, "SECTION", "")
    return {one.name: _read(one, hints[one.name], section) for one in dataclasses.fields(owner)}


def _read(field: dataclasses.Field[Any], hint: Any, section: str) -> Setting:
    arms = [hint]
    if get_origin(hint) in (Union, UnionType):
        arms = [arm for arm in get_args(hint) if arm is not NoneType]
    origin, args = get_origin(arms[0]), get_args(arms[0])
    rule = field.metadata.get("rule", _Rule())
    return Setting(
        name=field.name,
        kind=args[0] if origin is tuple else str if origin is Literal else origin or arms[0],
        is_optional=arms != [hint],
        is_list=origin is tuple,
        choices=args if origin is Literal else (),
        default=_default(field),
        rule=dataclasses.replace(rule, section=rule.section or section),
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def check(
    values: Any,
    *,
    owner: str = "",
    by: type | None = None,
    error: type[CardError] = SettingsError,
) -> None:
    """Refuse an object with an invalid field.

    Args:
        owner: the object, for the message.
        by: the class that declares its fields; None: its own class.
    Raises: ``error`` with the name, what is allowed and the value.
    """
    for name in declared(values.__class__):
        one, value = declared(by or values.__class__)[name], getattr(values, name)
        if allowed := one.fault(value):
            require(False, name + owner, allowed, value, error)


def require(holds: bool, name: str, allowed: str, value: object, error: type[CardError] = SettingsError) -> None:
    """Raise ``error`` with the allowed values unless ``holds``."""
    if not holds:
        raise error(f"{named(name) if name.isidentifier() else name} must be {allowed}, got {value!r}")


def make_plain(values: Any) -> None:
    """Convert a frozen dataclass's values to plain Python: `plain` numbers, and tuples for its lists.

    A list may be given as a single value, or as any sequence.
    """
    for name, one in declared(values.__class__).items():
        object.__setattr__(values, name, one.plain(getattr(values, name)))


def plain(value: Any) -> Any:
    """Return a number of NumPy's, or an array or tensor without dimensions, as Python's, and a path as a string."""
    if type(value) in _PLAIN:  # most are
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Integral) and not isinstance(value, int):
        return int(value)
    if isinstance(value, Real) and not isinstance(value, int | float):
        return float(value)
    return value


def _as_tuple(given: Any, kind: type) -> Any:
    """Return a list's value as a tuple; an unsuitable value is returned unchanged, to be refused later."""
    if given is None:
        return ()
    if isinstance(given, kind):
        return (given,)
    is_run = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    return tuple(map(plain, given)) if is_run else given


def _is(bound: float | None) -> bool:
    return bound is not None and math.isfinite(bound)
