"""Costs of operators, calls and filters in chat templates, above all those with an output far larger than the input."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from markupsafe import Markup

from card.text.work_meter import LISTS, TemplateCostError, WorkMeter

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda value, values: value in values,
    "notin": lambda value, values: value not in values,
}
TEST_COMPARISONS: Mapping[str, str] = {
    **dict.fromkeys(("==", "eq", "equalto", "!=", "ne"), "eq"),
    **dict.fromkeys((">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le"), "gt"),
    **dict.fromkeys(("lower", "upper"), "eq"),
    "in": "in",
}
_MOST_BITS = 1 << 16  # of a whole number
_MOST_WIDTH = 10_000  # that a text is filled up to, or decimals of a number
_WIDE = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
# Filters that look at the list itself, and not at what is in its values.
_SHALLOW = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random"}
    | {"reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
)
_SORTING = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
_SLOW = frozenset(
    {"filesizeformat", "groupby", "pprint", "striptags", "title", "urlencode", "urlize", "wordcount", "wordwrap"}
)
_QUADRATIC = frozenset({"pprint", "striptags", "urlize", "wordwrap"})  # in the length of a text, for some texts
_QUADRATIC_CHARS_PER_STEP = 1 << 14  # pairs of characters
_SLOW_SHARE = 16  # times what others take
_ESCAPED = 5  # characters that one can become in marked-up text
_TIME_CHARS = 256  # that a character of a format of times can become


def count_operator(meter: WorkMeter, name: str, left: Any, right: Any) -> None:
    """Count what an operator does with two values, before it does it."""
    meter.take(1)
    meter.look(left, right)
    if name == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | bytes | list | tuple) and isinstance(times, int):
                num_parts = len(one) * max(0, times)
                meter.take(num_parts // 256, num_parts * (1 if isinstance(one, str | bytes) else 8))
    if isinstance(left, int) and isinstance(right, int):
        if name == "*":
            _check_bits(left.bit_length() + right.bit_length())
        elif name == "**" and right > 0:
            _check_bits(left.bit_length() * right)
    if name == "%" and isinstance(left, str | bytes):
        count_percent(meter, left, right if isinstance(right, tuple) else (right,))


def count_percent(meter: WorkMeter, pattern: str | bytes, values: Sequence[Any]) -> None:
    """Count what is written by a pattern with places such as %5d."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    meter.take(1, len(text) + meter.read(values) * (1 + text.count("%")))
    if "*" in text and any(isinstance(one, int) and abs(one) > _MOST_WIDTH for one in values):
        raise _too_wide(max(abs(one) for one in values if isinstance(one, int)))
    if "%" in text:
        count_format_spec(meter, text)


def count_format_spec(meter: WorkMeter, spec: str) -> None:
    """Count what the widths in a format fill up."""
    for digits in re.findall(r"[0-9]+", spec):
        if len(digits) > 6 or int(digits) > _MOST_WIDTH:
            raise _too_wide(digits)
        meter.take(0, int(digits))


def count_call(meter: WorkMeter, called: Any, args: Sequence[Any], others: Iterable[Any]) -> None:
    """Count what a function or method does, before it does it."""
    given = [*args, *others]
    num_chars = meter.read(*given)
    meter.take(1)
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if name == "strftime_now":
        meter.take(0, num_chars * _TIME_CHARS)
    meter.look(owner)
    if not isinstance(owner, str | bytes | int):
        if isinstance(owner, list | tuple | range) and name in ("count", "index"):
            meter.read(owner)
        return
    if name in _WIDE:
        meter.take(0, _most(given))
    elif name == "expandtabs" and isinstance(owner, str | bytes):
        num_tabs = owner.count("\t") if isinstance(owner, str) else owner.count(b"\t")
        meter.take(0, num_tabs * max(8, _most(given)))
    elif name == "replace":
        count_replacing(meter, owner, given)
    elif name == "join" and given and isinstance(given[0], (str, dict, *LISTS)):
        meter.take(0, (len(owner) if isinstance(owner, str | bytes) else 0) * len(cast(Any, given[0])) + num_chars)
    elif name == "translate" and given and isinstance(owner, str | bytes):
        meter.take(0, len(owner) * max(1, _longest(_values(given[0]))))


def count_replacing(meter: WorkMeter, text: Any, given: Sequence[Any]) -> None:
    """Count what comes of putting one text for another; ``given`` are both."""
    kind = str if isinstance(text, str) else bytes
    if len(given) > 1 and isinstance(text, kind) and isinstance(given[0], kind) and isinstance(given[1], kind):
        number = cast(Any, text).count(given[0])
        longest = len(given[1]) * (_ESCAPED if isinstance(text, Markup) else 1)
        meter.take(len(text) // 256, len(text) + number * longest)


def count_filter(meter: WorkMeter, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Count what a filter does, before it does it."""
    given = [*args, *kwargs.values()]
    meter.take(1)
    if name in _SHALLOW:
        meter.look(value, *given)
        if name in ("batch", "slice"):
            meter.take(_most(given) // 4, 8 * _most(given))
        return
    num_values, num_chars, depth = meter.measure([value, *given])
    if name in _SORTING:
        meter.sort(value)
    if name in _SLOW:
        meter.take(_SLOW_SHARE * (num_values + num_chars // 256))
    if name in _QUADRATIC:
        meter.take(num_chars**2 // _QUADRATIC_CHARS_PER_STEP)
    if name in _GROWING:
        meter.take(0, _GROWING[name](str(value) if name in _TEXTS else value, given, (num_values, num_chars, depth)))
    elif name in _BOUNDED and _most(given) > _BOUNDED[name]:
        raise _too_wide(_most(given))
    elif name == "replace":
        count_replacing(meter, str(value), [str(one) for one in given[:2]])
    elif name == "format":
        count_percent(meter, str(value), given)
    elif name == "sum" and any(isinstance(one, list | tuple) for one in given):
        meter.take(num_values**2 // 64)


def _indented_chars(text: str, given: Sequence[Any], _: tuple[int, int, int]) -> int:
    return (text.count("\n") + 1) * max(_most(given) or 4, _longest(given))


def _json_chars(_: Any, given: Sequence[Any], measures: tuple[int, int, int]) -> int:
    num_values, num_chars, depth = measures
    return num_chars + num_values * (16 + max(_most(given), _longest(given)) * depth)


def _joined_chars(value: Any, given: Sequence[Any], measures: tuple[int, int, int]) -> int:
    num_parts = len(value) if isinstance(value, str | bytes) else measures[0]
    return measures[1] + len(str(given[0]) if given else "") * num_parts


_GROWING: Mapping[str, Callable[[Any, Sequence[Any], tuple[int, int, int]], int]] = {
    "center": lambda text, given, measures: _most(given) or 80,
    "indent": _indented_chars,
    "join": _joined_chars,
    "tojson": _json_chars,
}
"""The characters that filters make at most, by their value, what they are told, and the measures of all that."""
_TEXTS = frozenset({"center", "indent"})  # filters that make a text of their value first
_BOUNDED: Mapping[str, int] = {"int": 1 << 24, "round": 1000, "truncate": 1 << 24, "wordwrap": 1 << 24}


def _longest(given: Iterable[Any]) -> int:
    return max((len(one) for one in given if isinstance(one, str)), default=0)


def _values(table: Any) -> Iterable[Any]:
    return table.values() if isinstance(table, dict) else table if isinstance(table, list | tuple) else ()


def _most(given: Iterable[Any]) -> int:
    """Return the largest number among arguments."""
    return max((abs(one) for one in given if isinstance(one, int)), default=0)


def _check_bits(number: int) -> None:
    if number > _MOST_BITS:
        raise TemplateCostError(
            f"the chat template makes a number of more than {_MOST_BITS:,} bits; use a model with another chat template"
        )


def _too_wide(width: object) -> TemplateCostError:
    return TemplateCostError(
        f"the chat template fills a text up to {str(width)[:20]} characters, and at most {_MOST_WIDTH:,} are possible; "
        "use a model with another chat template"
    )
