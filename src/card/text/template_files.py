"""Chat templates from files that a user names."""

from __future__ import annotations

import copy
from pathlib import Path

from card.errors import SettingsError
from card.machine.folders import expanded
from card.text.lines import read_text
from card.text.tokenizer import Tokenizer


def with_templates(tokenizer: Tokenizer, chat: str | None, tools: str | None) -> Tokenizer:
    """Return a tokenizer with the templates in these files in place of its own; None leaves its own.

    Raises: SettingsError for a file that cannot be read.
    """
    if chat is None and tools is None:
        return tokenizer
    stated = tokenizer.chat_template
    templates = {"default": stated} if isinstance(stated, str) else dict(stated or {})
    if chat is not None:
        templates = {"default": _read(chat)}
    if tools is not None:
        templates["tool_use"] = _read(tools)
    changed = copy.copy(tokenizer)  # the given one may serve others
    changed.chat_template = templates["default"] if [*templates] == ["default"] else templates
    return changed


def _read(name: str) -> str:
    return read_text(Path(expanded(name)), SettingsError)
