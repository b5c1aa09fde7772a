"""Writers of an engine: those of its method, and those that its settings name."""

from __future__ import annotations

from collections.abc import Sequence

from card.config.method import Method
from card.drafting.local import find_writer
from card.engine.offers import DRAFTER, GRAMMAR
from card.errors import SettingsError, named


def share_out(method: Method, names: Sequence[str] | None, usual: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Return whether the draft model writes, and which local writers do.

    Args:
        names: those that were named; None: by the method.
        usual: local ones that then join those of the method.
    """
    if names is None:
        return method.needs_draft, (*method.writers, *usual)
    if DRAFTER in names and not method.needs_draft:
        raise SettingsError(f"method {method.name} has no draft model: leave {DRAFTER} out of {named('writers')}")
    if DRAFTER not in names and method.needs_draft and not method.is_tuned:
        raise SettingsError(
            f"method {method.name} is defined by its draft model: add {DRAFTER} to {named('writers')}, or use method "
            "card"
        )
    local = [*method.writers, *(name for name in names if name not in (DRAFTER, GRAMMAR))]
    for name in local:
        find_writer(name)
    return DRAFTER in names, tuple(dict.fromkeys(local))


def foresees_forced(method: Method, names: Sequence[str] | None) -> bool:
    """Return whether grammars propose what they force: of any method that has candidates, unless writers are named."""
    if names is not None:
        return GRAMMAR in names
    return bool(method.needs_draft or method.writers or method.selection)
