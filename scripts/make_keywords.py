"""Write card/config/keywords.pyi, by which editors complete settings; a test checks that it is up to date.

python scripts/make_keywords.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from card.config.drafting import DraftSettings
from card.config.fields import Setting, declared
from card.config.keywords import of_engine

STUB = Path(__file__).parents[1] / "src" / "card" / "config" / "keywords.pyi"
HEAD = '''\
"""The settings of an engine as keyword arguments. Made by scripts/make_keywords.py."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from card.config.fields import Setting

NAMED_ARGUMENTS: frozenset[str]

def of_engine() -> Mapping[str, Setting]: ...

class DraftKeywords(TypedDict, total=False):
    """Fields of `DraftSettings`."""

'''
OF_ENGINES = '''
class LLMSettings(DraftKeywords, total=False):
    """Settings of `card.LLM` and `card.AsyncLLM` besides target, draft and method."""

'''


def stub() -> str:
    """Return the text of the stub."""
    return "".join([HEAD, *_fields(declared(DraftSettings)), OF_ENGINES, *_fields(of_engine())])


def _fields(settings: Mapping[str, Setting]) -> Iterator[str]:
    for name, one in settings.items():
        yield f"    {name}: {_written(one)}\n"


def _written(one: Setting) -> str:
    """Return the type by which a setting is given, as source."""
    choices = ", ".join(f'"{choice}"' for choice in one.choices)
    kind = f"Literal[{choices}]" if choices else one.kind.__name__
    if kind == "str" and not one.is_list:
        kind = "str | PathLike[str]"  # a path is taken for any string
    return kind + f" | Sequence[{kind}]" * one.is_list + " | None" * one.is_optional


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
