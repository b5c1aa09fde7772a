"""Warnings about models that would be said again wherever the same one is opened."""

from __future__ import annotations

import functools
import logging


@functools.cache
def say_once(words: str) -> None:
    """Log a warning the first time only."""
    logging.getLogger(__name__).warning(words)
