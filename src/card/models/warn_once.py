"""Warnings that are logged once, however often the same model is opened."""

from __future__ import annotations

import functools
import logging


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time only."""
    logging.getLogger(__name__).warning(message)
