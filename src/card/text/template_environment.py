"""The environment of chat templates: Jinja's sandbox, with the functions, filters and tags that templates use besides.

The names and what they do are those that transformers gives to templates, which are written for it.
Source: https://huggingface.co/docs/transformers/main/en/chat_templating_writing
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions, the filters and the tags that chat templates use."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], autoescape=False, **options
        )
        self.filters["tojson"] = tojson
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]  # writes as much text at random as it is told to


class _GenerationTag(Extension):
    """``{% generation %}``: marks what the assistant writes, for trainings; here it is text like any other."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # of which only ``in`` is asked

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)  # what is set inside is not seen outside


def raise_exception(message: str) -> NoReturn:
    """Refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the time now."""
    return datetime.now().strftime(format)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON, and not, like Jinja's own filter, as JSON for a page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """The function ``dict`` without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The function ``namespace``, whose values have no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a value may be called self
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template cannot keep a value under the name {name[:40]!r}")
