"""Formats of models' tool calls, and the choice of one by a model's chat template and vocabulary."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

ToolParserName = Literal["auto", "hermes", "llama3", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls: blocks of JSON objects, each with the function's name and its arguments.

    A block is ``marker``, ``opening``, objects with ``joint`` between them, ``closing``.
    """

    name: str
    marker: str  # begins a block anywhere in a text
    opening: str
    closing: str
    joint: str | None = None  # None: a block has one object
    block_joint: str | None = None  # between blocks; None: a text has one of them
    arguments_key: str = "arguments"
    is_bare: bool = False  # a text that begins with an object is a block without a marker

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return calls, each a name and the JSON of its arguments, as the model writes them."""
        objects = [f'{{"name": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}' for name, arguments in calls]
        if self.joint is not None:
            marker = "" if self.is_bare else self.marker
            return marker + self.opening + self.joint.join(objects) + self.closing
        assert self.block_joint is not None
        return self.block_joint.join(self.marker + self.opening + one + self.closing for one in objects)


HERMES = ToolFormat(
    name="hermes", marker="<tool_call>", opening="\n", closing="\n</tool_call>", block_joint="\n"
)  # Hermes, Qwen 2.5, Qwen 3
LLAMA3 = ToolFormat(
    name="llama3", marker="<|python_tag|>", opening="", closing="", joint="; ", arguments_key="parameters", is_bare=True
)
MISTRAL = ToolFormat(name="mistral", marker="[TOOL_CALLS]", opening="[", closing="]", joint=", ")

FORMATS = {one.name: one for one in (HERMES, LLAMA3, MISTRAL)}


def find_format(template: str, vocabulary: Collection[str]) -> ToolFormat | None:
    """Return a model's format; None if its template has tools in an unknown format.

    Args:
        template: the chat template with tools.
        vocabulary: the tokenizer's tokens.
    """
    if MISTRAL.marker in template:
        return None if "[ARGS]" in template else MISTRAL
    if HERMES.marker in template:
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if '"parameters":' in template and '"name":' in template:
        return LLAMA3
    if has_tools(template):
        return None
    return next((one for one in (MISTRAL, LLAMA3) if one.marker in vocabulary), HERMES)


def has_tools(template: str) -> bool:
    """Return whether a chat template describes tools to the model."""
    return "tools" in template
