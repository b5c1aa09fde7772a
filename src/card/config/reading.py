"""The readers of a setting: one that nothing reads is refused, as it would do nothing.

A declaration names its readers: one of the words below, or "method X", "writer X", "growth X". Without any, every
engine reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from card.config.fields import Setting
from card.errors import SettingsError, named

DRAFTING = "drafting with a model"
DRAFTING_HERE = "drafting with a model here"  # not by a draft server
CANDIDATES = "candidates"
IMAGES = f"images in prompts, which {named('max_images')} allows"


def unread(given: Mapping[str, Any], known: Mapping[str, Setting], there: frozenset[str]) -> list[str]:
    """Return the settings that nothing reads; a default value is no request.

    Args:
        there: the readers that there are.
    """
    return [
        name
        for name, value in given.items()
        if known[name].readers
        and there.isdisjoint(known[name].readers)
        and known[name].plain(value) != known[name].default
    ]


def refuse_unread(given: Mapping[str, Any], known: Mapping[str, Setting], there: frozenset[str], what: str) -> None:
    """Refuse a setting that nothing reads; arguments as of `unread`.

    Args:
        what: has these readers.
    Raises: SettingsError that names the setting and its readers.
    """
    for name in unread(given, known, there):
        raise SettingsError(
            f"{named(name)} would do nothing: it is for {' or '.join(known[name].readers)}, and this is {what}; leave "
            "it out, or choose what reads it"
        )
