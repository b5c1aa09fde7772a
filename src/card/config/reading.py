"""What reads a setting: one that nothing reads is refused, as it would do nothing.

A declaration names its readers: one of the words below, or "method X", "writer X", "growth X". Without any, every
engine reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from card.config.fields import Setting
from card.errors import SettingsError

DRAFTING = "drafting with a model"
DRAFTING_HERE = "drafting with a model here"  # not by a draft server
CANDIDATES = "candidates"
IMAGES = "images in prompts"


def refuse_unread(given: Mapping[str, Any], known: Mapping[str, Setting], there: frozenset[str], what: str) -> None:
    """Refuse a setting that nothing reads, unless it has its default value.

    Args:
        there: the readers that there are.
        what: has these readers.
    Raises: SettingsError that names the setting and its readers.
    """
    for name, value in given.items():
        one = known[name]
        if one.readers and there.isdisjoint(one.readers) and one.plain(value) != one.default:
            raise SettingsError(
                f"{name} would do nothing: it is for {' or '.join(one.readers)}, and this is {what}; leave it out, or "
                "choose what reads it"
            )
