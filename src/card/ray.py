"""`serve run card.ray:app`: the public door of `card.labs.ray`."""

from card.labs.ray import __getattr__  # noqa: F401
