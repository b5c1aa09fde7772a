"""Loading what computes when a command needs it, so that help, completion and errors come at once."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from card.cli.interrupts import leaving_at_once
from card.cli.progress import spinner

_WORDS = "importing torch and transformers"


def load(name: str, words: str = _WORDS) -> Any:
    """Return a module, imported now if it was not yet. Ctrl-C meanwhile ends the process at once.

    Args:
        words: for the spinner; empty for a module that is there at once.
    """
    if name in sys.modules:
        return import_module(name)
    with leaving_at_once():
        if not words:
            return import_module(name)
        with spinner(words):
            return import_module(name)


def run(name: str, words: str = _WORDS, /, **options: Any) -> int:
    """Do the work of a command: call ``run`` of this module with the options; return the exit status."""
    status = load(name, words).run(**options)
    return status if isinstance(status, int) else 0
